"""The receipt: the proof of a result, beside the model that it belongs to."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.config import DataError, digest
from pipeline.tracking.journal import metrics_by_step, read

CODE = Path(__file__).parents[2]
# Written when an image is built.
IMAGE = Path("/etc/lockstep/image")
# What computes an experiment. Its parameters are in the receipt; outs and dvc.lock lie in the same tree and change with every run.
SOURCES = ("pipeline", "dvc.yaml", "requirements.lock")


HexFloat = Annotated[str, Field(pattern=r"^-?(0x[01]\.[0-9a-f]+p[+-]\d{1,4}|nan|inf)$")]


class Epoch(BaseModel):
    """The end of an epoch."""

    epoch: int
    step: int
    train_loss: HexFloat
    validation_loss: HexFloat
    validation_accuracy: float


class Receipt(BaseModel):
    """What is read again of a receipt; it holds more."""

    model_config = ConfigDict(frozen=True)

    # It names a folder of runs/.
    fingerprint: str = Field(pattern="^[0-9a-f]{16}$")
    # What the fingerprint is a hash of; receipts of earlier versions lack it.
    identity: dict[str, Any] = {}
    model_sha256: str
    weights_sha256: str
    data_digest: str
    parameters: dict[str, Any]
    precision: Literal["fp32", "bf16"]
    placement: dict[str, Any] = {}
    git: dict[str, Any] = {}
    journal: str
    mlflow_run_id: str | None
    steps: int
    best: Epoch
    epochs: list[Epoch] = Field(min_length=1)


def read_receipt(path: Path, cure: str) -> Receipt:
    """Return a receipt; raises DataError if it is damaged, or from a version that wrote others."""
    try:
        return Receipt.model_validate_json(path.read_bytes())
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"])) or "the whole"
        raise DataError(f"{path}: is damaged, or from another version of this code ({key}); {cure}") from None
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DataError(f"{path}: {error.strerror}; {cure}") from None


def image() -> str | None:
    """Return the image that this runs in: Docker's id if LOCKSTEP_IMAGE passes it, else the digest of what it was built from."""
    return os.environ.get("LOCKSTEP_IMAGE") or (IMAGE.read_text().strip() if IMAGE.exists() else None)


def git_state(code: Path = CODE, own: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the commit of this code and whether its tree differs from it; in an image, the commit that its builder passed.

    Files of the user's own count too, and so that they are in a commit at all.
    """
    if not (code / ".git").exists():
        return {"commit": os.environ.get("LOCKSTEP_COMMIT") or None, "dirty": None}

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=code, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # One file may have both functions.
        files = sorted({path.resolve() for path in own})
        within = [str(path) for path in files if path.is_relative_to(code.resolve())]
        unknown = len(within) < len(files) or bool(within and len(git("ls-files", "--", *within).splitlines()) < len(within))
        return {"commit": git("rev-parse", "HEAD"), "dirty": unknown or bool(git("status", "--porcelain", "--", *SOURCES, *within))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def epochs(journal: Path) -> list[dict[str, Any]]:
    """Return the figures at the end of every epoch; losses as hexadecimal floats, so that no bit is lost in print."""
    ends = [(step, values) for step, values in metrics_by_step(journal).items() if "validation/loss" in values]
    return [
        {
            "epoch": number,
            "step": step,
            "train_loss": values["train/loss"].hex(),
            "validation_loss": values["validation/loss"].hex(),
            "validation_accuracy": values["validation/accuracy"],
        }
        for number, (step, values) in enumerate(ends, 1)
    ]


def best_epoch(ends: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the epoch whose model is published: the one with the highest validation accuracy, of equals the first."""
    return max(ends, key=lambda end: end["validation_accuracy"])


def elapsed_seconds(journal: Path) -> float:
    """Return how long all attempts took together; of one that was killed, the time to its last line."""
    total, began, so_far = 0.0, None, 0.0
    for line in read(journal):
        at = line.get("at")
        if line["kind"] == "started":
            total, began, so_far = total + so_far, at, 0.0
        elif line["kind"] == "attempt-ended":
            total, began, so_far = total + line["elapsed_seconds"], None, 0.0
        elif isinstance(began, int) and isinstance(at, int):
            so_far = max(so_far, (at - began) / 1000)
    return round(total + so_far, 3)


def comparable(identity: dict[str, Any]) -> str:
    """Return what runs share that differ in seed and placement alone: 16 hexadecimal digits."""
    of_placement = {"world_size", "nodes", "accumulation", "backend", "replicas"}
    dist = {name: value for name, value in identity["dist"].items() if name not in of_placement}
    # The seed decides which images are held out, and so the prepared data; the source of the data is the same.
    return digest({name: value for name, value in identity.items() if name not in ("seed", "prepared data")} | {"dist": dist})[:16]


def tags(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the tags that runs are searched by in MLflow."""
    return {
        "lockstep.fingerprint": facts["fingerprint"],
        "lockstep.data_digest": facts["data_digest"],
        "lockstep.comparable": comparable(facts["identity"]),
        "lockstep.global_batch": facts["identity"]["dist"]["global_batch"],
        "lockstep.world_size": facts["placement"]["world_size"],
        "lockstep.backend": facts["placement"]["backend"],
        "lockstep.device": facts["device"],
        "lockstep.precision": facts["precision"],
        "lockstep.seed": facts["parameters"]["seed"],
        "lockstep.image": facts["image"],
        "mlflow.source.git.commit": facts["git"]["commit"],
        "lockstep.dirty": facts["git"]["dirty"],
        "dvc.experiment": os.environ.get("DVC_EXP_NAME"),
    }
