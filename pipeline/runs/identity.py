"""The identity of a run: all that can change its bits; and the fingerprint, which is its hash and names the run's folder."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.config import Config, MachineError, digest
from pipeline.config.own_code import packages
from pipeline.files import atomic_write
from pipeline.hardware.environment import NCCL_SWITCHES, switches
from pipeline.hardware.machine import cuda_of_torch
from pipeline.hardware.placement import Placement
from pipeline.job import FirstWeights
from pipeline.runs.source import source_digests

IDENTITY = "identity.json"
# What computes on every device; torchvision draws the first weights of its models.
EVERYWHERE = ("torch", "torchvision", "numpy")
# What computes on GPUs: kernels, what compiles cuDNN's at run time, what compiles torch.compile's.
ON_GPUS = ("nvidia-cudnn", "nvidia-cublas", "nvidia-cuda-nvrtc", "triton")
# It moves bytes under `ordered`, and adds only under `native`.
NCCL = "nvidia-nccl"


def versions(config: Config, device: str, backend: str) -> dict[str, str]:
    """Versions of the packages that compute in this experiment, read without importing them."""
    found = {name: version(name) for name in EVERYWHERE}
    if config.model.source is not None:
        found |= packages(config.model.source)
    if device == "cuda":
        found |= {name: _version_for_cuda(name) for name in (*ON_GPUS, *([NCCL] if _nccl_adds(config, backend) else []))}
    return found


def _nccl_adds(config: Config, backend: str) -> bool:
    return config.dist.reduction == "native" and backend == "nccl"


def _version_for_cuda(name: str) -> str:
    """The version of a package whose name may end with the CUDA that it is for."""
    for package in (f"{name}-cu{cuda_of_torch() // 1000}", name):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise MachineError(f"{name}: not installed as a package, so it is unknown which one would compute on the GPU; run: make setup")


def run_identity(config: Config, placement: Placement, data: dict[str, str | None], first: FirstWeights | None) -> dict[str, Any]:
    """All that a fingerprint is made of."""
    first_weights = {"first weights": first.sha256} if first else {}
    nccl = {"nccl": switches(NCCL_SWITCHES)} if _nccl_adds(config, placement.backend) else {}
    return (
        nccl
        | first_weights
        | config.identity(placement.device_kind, placement.precision, placement.backend)
        | data
        | {
            "versions": versions(config, placement.device, placement.backend),
            "source": source_digests(config),
        }
    )


def fingerprint(identity: dict[str, Any]) -> str:
    """16 hexadecimal digits: the same for the same experiment on any placement."""
    return digest(identity)[:16]


def write_identity(run: Path, identity: dict[str, Any]) -> None:
    """Write identity.json once, so that a later start can name what differs."""
    if not (run / IDENTITY).exists():
        atomic_write(run / IDENTITY, (json.dumps(identity, indent=2) + "\n").encode())


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as `dist.world_size`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}  # pyright: ignore
    return found
