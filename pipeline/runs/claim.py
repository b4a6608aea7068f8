"""What a person claims of a run, to be verified: its receipt, or what is left of one that is not finished."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config import Config, ConfigError, DataError, digest
from pipeline.runs.identity import IDENTITY
from pipeline.tracking.journal import last
from pipeline.tracking.receipt import Receipt, read_receipt

RECEIPT = "receipt.json"
NAME_ONE = "name a receipt, or a run's folder such as runs/0123456789abcdef"


@dataclass(frozen=True)
class Claim:
    """What is to be verified: a run and, where it is finished, its receipt."""

    name: str
    run: Path
    identity: dict[str, Any]
    parameters: dict[str, Any]
    receipt: Receipt | None

    @property
    def config(self) -> Config:
        """Its parameters, checked; DataError if this version of the code knows others."""
        try:
            return Config.model_validate(self.parameters)
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"]))
            raise DataError(f"{self.name}: is from another version of this code (parameters: {key})") from None


def read_claim(what: Path, runs: Path) -> Claim:
    """Read what is to be verified: a receipt, a folder with one, or the folder of a run that is not finished."""
    path = what / RECEIPT if what.is_dir() else what
    if not what.exists():
        raise ConfigError(f"{what}: no such file or folder; {NAME_ONE}, or train: dvc repro")
    if not path.exists():
        return _unfinished(what)
    receipt = read_receipt(path, NAME_ONE)
    run = what if (what / "journal.jsonl").exists() else runs / receipt.fingerprint
    if not receipt.identity:
        raise DataError(f"{path}: is from a version of this code that wrote less; {NAME_ONE}")
    found = digest(receipt.identity)[:16]
    if found != receipt.fingerprint:
        raise DataError(f"{path}: was altered: its fingerprint is {receipt.fingerprint}, and that of its identity {found}")
    return Claim(str(path), run, receipt.identity, receipt.parameters, receipt)


def _unfinished(run: Path) -> Claim:
    """Read the folder of a run that has no receipt yet."""
    header = last(run / "journal.jsonl", "run") if (run / "journal.jsonl").is_file() else {}
    try:
        identity = json.loads((run / IDENTITY).read_bytes())
    except (OSError, ValueError, RecursionError):
        identity = None
    if not header or not isinstance(identity, dict):
        raise ConfigError(f"{run}: is neither a receipt nor the folder of a run; {NAME_ONE}")
    values: dict[str, Any] = {}
    jobs = sorted(run.glob("logs/*/job.json"), key=lambda path: path.stat().st_mtime)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        # All of it, which the journal's lines for MLflow are not.
        return Claim(str(run), run, identity, json.loads(jobs[-1].read_bytes())["config"], None)  # pyright: ignore
    for name, value in header["params"].items():
        section, _, key = name.partition(".")
        values |= {section: values.get(section, {}) | {key: value}} if key else {section: value}
    return Claim(str(run), run, identity, values, None)  # pyright: ignore[reportUnknownArgumentType]
