"""The fingerprint of an experiment: identity, data, torch and the source that a rank runs, in one name."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.config import Config, digest
from pipeline.files import atomic_write
from pipeline.hardware.placement import Placement

IDENTITY = "identity.json"
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


def write_identity(run: Path, identity: dict[str, Any]) -> None:
    """What this run's fingerprint is made of, for whoever asks what differs."""
    if not (run / IDENTITY).exists():
        atomic_write(run / IDENTITY, (json.dumps(identity, indent=2) + "\n").encode())


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as `dist.world_size`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}  # pyright: ignore
    return found
