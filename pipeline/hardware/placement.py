"""From what is asked for and what is here to where each rank runs; every check that needs the machine."""

import os
from dataclasses import dataclass
from typing import Literal

from pipeline.config import Config, ConfigError, Dist, MachineError
from pipeline.hardware.cgroup import usable_cpus
from pipeline.hardware.machine import Machine, cuda_of_torch

# The compute capabilities from which on bf16 is native, and from which on CUDA 13 has kernels.
AMPERE, TURING = 80, 75


@dataclass(frozen=True)
class Placement:
    """Device, backend and precision, with nothing left to decide."""

    device: Literal["cpu", "cuda"]
    device_kind: str
    backend: Literal["gloo", "nccl"]
    precision: Literal["fp32", "bf16"]


def resolve(config: Config, machine: Machine) -> Placement:
    """Return where ranks run; raises MachineError if they cannot, with the setting that works."""
    dist = config.dist
    here = dist.world_size // dist.nodes
    gpus = len(machine.gpus)
    if gpus:
        _check_gpus(machine)
    if dist.backend == "nccl" and gpus == 0:
        raise MachineError("dist.backend: nccl needs GPUs and this machine shows none; set backend: gloo (or auto)")
    if dist.backend == "nccl" and gpus < here:
        raise MachineError(
            f"dist.world_size: {here} ranks, {gpus} GPUs: nccl wants one each; set world_size: {gpus * dist.nodes}, or backend: gloo"
        )
    device: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    return Placement(
        device=device,
        device_kind=machine.gpus[0] if gpus else machine.cpu,
        backend="nccl" if gpus >= here and dist.backend != "gloo" else "gloo",
        precision=_precision(config.train.precision, device, machine),
    )


def as_many_ranks(config: Config, machine: Machine, asked: str = "") -> Config:
    """Return the experiment with a number for world_size: auto: on every machine as many ranks as an engine asks for, GPUs, or cores."""
    dist = config.dist
    if not dist.auto:
        return config
    ranks = int(asked) if asked.isdigit() else len(machine.gpus) or usable_cpus() // dist.threads_per_rank
    if dist.pieces < dist.nodes:
        raise ConfigError(f"dist.lanes: {dist.pieces} are fewer than {dist.nodes} machines; start fewer, or set another number of lanes")
    most = 1 if dist.strategy == "dataparallel" else max(1, min(ranks, dist.pieces // dist.nodes))
    sized = dist.model_copy(update={"auto": False} | fewer_ranks(dist, most))
    return config.model_copy(update={"dist": sized})


def a_gpu_each(config: Config, machine: Machine) -> Config:
    """Return the same experiment on fewer ranks where one machine has fewer GPUs: ranks that share one meet in host memory, slowly."""
    dist, gpus = config.dist, len(machine.gpus)
    if not 0 < gpus < dist.world_size or dist.nodes > 1 or dist.backend != "auto" or dist.reduction != "ordered":
        return config
    # A list is one of as many ranks as were asked for.
    shares = {"lanes_per_rank": None} if isinstance(dist.lanes_per_rank, list) else {}
    return config.model_copy(update={"dist": dist.model_copy(update=fewer_ranks(dist, gpus) | shares)})


def said_of_fewer(asked: Dist, dist: Dist) -> str:
    """What people hear where there are fewer ranks than they asked for, or nothing."""
    fewer = f"world size {dist.world_size} and not {asked.world_size}"
    return f"{fewer}, as ranks that share a GPU are slow; the bits are the same" if dist.world_size < asked.world_size else ""


def fewer_ranks(dist: Dist, most: int) -> dict[str, int]:
    """Return the settings of the same experiment with as many ranks as possible, but no more than `most` per machine."""
    sizes = [size for size in range(dist.nodes * max(most, 1), 0, -dist.nodes) if dist.strategy != "fsdp" or dist.pieces % size == 0]
    width = dist.world_size // dist.replicas
    if dist.replicas > 1:
        # Copies of the model on as many ranks each, if there is room for one.
        sizes.sort(key=lambda size: size % width > 0)
    must_divide = dist.batch_size_per_gpu is not None or dist.reduction != "ordered"
    size = next(size for size in sizes if not must_divide or dist.images_per_step % (size * dist.accumulation) == 0)
    found = {"world_size": size}
    if dist.replicas > 1:
        found["replicas"] = size // width if size % width == 0 else 1
    if dist.batch_size_per_gpu is not None:
        found["batch_size_per_gpu"] = dist.images_per_step // (size * dist.accumulation)
    return found


def to_fewer_ranks(dist: Dist, most: int) -> str:
    """The settings of the same experiment with as many ranks as possible, but no more than `most` per node."""
    settings = ", ".join(f"{name}: {value}" for name, value in fewer_ranks(dist, most).items())
    return f"set dist.{settings}{', lanes_per_rank: null' if isinstance(dist.lanes_per_rank, list) else ''}"


def on_cpus(dist: Dist, placement: Placement) -> str:
    """How many ranks and threads compute on this machine's cores."""
    ranks_here, cores = dist.world_size // dist.nodes, len(os.sched_getaffinity(0))
    threads = ranks_here * dist.threads_per_rank
    return f"no GPU; {ranks_here} ranks with {threads} threads on {cores} cores ({placement.backend}, {placement.precision})"


def slow_on_cpus(dist: Dist, placement: Placement, machine: Machine) -> list[tuple[str, str]]:
    """What makes ranks on this machine's CPUs slower than they need be, each with what to set."""
    cores = len(os.sched_getaffinity(0))
    found: list[tuple[str, str]] = []
    if dist.world_size // dist.nodes * dist.threads_per_rank > cores:
        found.append((f"{on_cpus(dist, placement)}, which is slow", to_fewer_ranks(dist, cores // dist.threads_per_rank)))
    if placement.precision == "bf16" and not machine.fast_bf16_on_cpu:
        found.append(("bf16 is not known to be faster than fp32 on this CPU", "set train.precision: auto"))
    return found


def _check_gpus(machine: Machine) -> None:
    """Raise MachineError if torch cannot compute on these GPUs, or not the same bits on all of them."""
    if len(set(machine.gpus)) > 1:
        raise MachineError(
            f"GPUs of several kinds ({', '.join(sorted(set(machine.gpus)))}) compute different bits; pick with CUDA_VISIBLE_DEVICES"
        )
    # Within a major version an older driver will do.
    if machine.driver // 1000 < cuda_of_torch() // 1000:
        can, needs = (f"{one // 1000}.{one % 1000 // 10}" for one in (machine.driver, cuda_of_torch()))
        raise MachineError(
            f"the GPU's driver can do CUDA {can} and torch needs {needs}; update the driver, or set CUDA_VISIBLE_DEVICES= for CPUs"
        )
    if machine.capability < TURING and cuda_of_torch() >= 13000:
        raise MachineError(f"{machine.gpus[0]}: CUDA 13 has no kernels for GPUs before Turing (7.5); set CUDA_VISIBLE_DEVICES= for CPUs")


def _precision(asked: str, device: str, machine: Machine) -> Literal["fp32", "bf16"]:
    if asked == "auto":
        native = machine.capability >= AMPERE if device == "cuda" else machine.fast_bf16_on_cpu
        return "bf16" if native else "fp32"
    return "bf16" if asked == "bf16" else "fp32"
