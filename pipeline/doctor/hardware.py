"""Checks of what the ranks compute on: GPUs, cores, memory and /dev/shm."""

import shutil
from pathlib import Path

from pipeline.config import Config, ConfigError, Dist, MachineError
from pipeline.doctor.finding import Finding
from pipeline.hardware.machine import Machine
from pipeline.hardware.placement import a_gpu_each, on_cpus, resolve, slow_on_cpus, to_fewer_ranks

MIB, GIB = 1 << 20, 1 << 30
SHARED_BYTES = 256 * MIB
# A rank of the default experiment peaks at 0.5 GiB; on a GPU, CUDA's libraries and pinned memory take about 4 (not measured here).
RANK_BYTES = {"cpu": GIB, "cuda": 4 * GIB}


def ranks(config: Config, machine: Machine) -> list[Finding]:
    """Whether there is a GPU, or else a core, for each rank and thread."""
    asked, config = config.dist, a_gpu_each(config, machine)
    try:
        placement = resolve(config, machine)
    except (ConfigError, MachineError) as error:
        return [Finding("wrong", str(error))]
    dist, gpus = config.dist, len(machine.gpus)
    ranks_here = dist.world_size // dist.nodes
    how = f"{placement.backend}, {placement.precision}"
    if placement.device == "cpu":
        slow = slow_on_cpus(dist, placement, machine)
        return [Finding("note", *found) for found in slow] or [Finding("ok", on_cpus(dist, placement))]
    text = f"{ranks_here} rank{'s' * (ranks_here > 1)} on {gpus} GPU{'s' * (gpus > 1)}, {machine.gpus[0]} ({how})"
    if gpus < ranks_here and dist.backend == "auto":
        return [Finding("wrong", f"{text}: ranks that share a GPU through gloo are slow", to_fewer_ranks(dist, gpus))]
    if dist.world_size < asked.world_size:
        why = f"not {asked.world_size}, as ranks that share a GPU are slow; the bits are the same"
        return [Finding("note", f"{text}: {why}", to_fewer_ranks(asked, gpus))]
    return [Finding("ok", text)]


def memory(dist: Dist, limit_bytes: int | None, device: str) -> list[Finding]:
    """A note if the control group's limit leaves less for each rank than it needs."""
    ranks_here = dist.world_size // dist.nodes
    if limit_bytes is None or limit_bytes >= ranks_here * RANK_BYTES[device]:
        return []
    text = f"a control group allows {limit_bytes // MIB} MiB of memory to {ranks_here} ranks"
    enough = f"{2 * ranks_here * RANK_BYTES[device] // GIB}g"
    return [Finding("note", text, f"MEMORY={enough} docker compose up, or docker run --memory={enough}")]


def shared_memory(folder: Path) -> Finding:
    """Whether /dev/shm is large enough for gloo and nccl, which end in "Bus error" if it is not."""
    size_bytes = shutil.disk_usage(folder).total if folder.is_dir() else 0
    text = f"{folder} has {size_bytes // MIB} MiB"
    if size_bytes >= SHARED_BYTES:
        return Finding("ok", text)
    return Finding("wrong", f"{text}, and ranks need {SHARED_BYTES // MIB}", "shm_size: 1gb in Compose, or docker run --shm-size=1g")
