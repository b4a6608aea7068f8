"""The fingerprint of an experiment: identity, data, torch and the source that a rank runs, in one name."""

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.config import Config, digest
from pipeline.launch.placement import Placement

PACKAGE = Path(__file__).parents[1]
# What a rank computes with; what only starts, records or reports is not part of it.
COMPUTES = ("config.py", "ranks.py", "data", "models", "parallel", "training")


def source_digest() -> str:
    """One digest over the files that can change a bit of what is learned."""
    total = hashlib.sha256()
    for entry in COMPUTES:
        path = PACKAGE / entry
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            total.update(f"{file.relative_to(PACKAGE).as_posix()} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def versions() -> dict[str, str]:
    """What computes, by version."""
    return {name: version(name) for name in ("torch", "torchvision", "numpy")}


def whole_identity(config: Config, placement: Placement, data_digest: str) -> dict[str, Any]:
    """All that a fingerprint is made of."""
    identity = config.identity(placement.device_kind, placement.precision, placement.backend)
    return identity | {"prepared data": data_digest, "versions": versions(), "source of what a rank runs": source_digest()}


def fingerprint(identity: dict[str, Any]) -> str:
    """16 hexadecimal digits: the same for the same experiment on any placement."""
    return digest(identity)[:16]
