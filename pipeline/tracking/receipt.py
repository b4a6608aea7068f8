"""The receipt: the proof of a result, beside the model it belongs to."""

import os
import subprocess
from pathlib import Path
from typing import Any

from pipeline.tracking.journal import read

CODE = Path(__file__).parents[2]
# Written when an image is built.
IMAGE = Path("/etc/lockstep/image")
# What an experiment is made of; outs and dvc.lock lie in the same tree and change with every run.
SOURCES = ("pipeline", "params.yaml", "dvc.yaml", "requirements.lock")


def image() -> str | None:
    """The image that this runs in: Docker's id of it where someone passes it, else the digest of what it is made of."""
    return os.environ.get("LOCKSTEP_IMAGE") or (IMAGE.read_text().strip() if IMAGE.exists() else None)


def git_state() -> dict[str, Any]:
    """The commit of this code and whether its tree differs from it; for code in an image, what its builder passed."""
    if not (CODE / ".git").exists():
        return {"commit": os.environ.get("LOCKSTEP_COMMIT") or None, "dirty": None}

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=CODE, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", *SOURCES))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def epochs(journal: Path) -> list[dict[str, Any]]:
    """The figures at the end of every epoch; losses as hexadecimal floats, so that no bit is lost in print."""
    by_step: dict[int, dict[str, float]] = {}
    for line in read(journal):
        if line["kind"] == "metrics":
            by_step.setdefault(line["step"], {}).update(line["values"])
    ends = [(step, values) for step, values in sorted(by_step.items()) if "validation/loss" in values]
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
    """The epoch whose model is published: the highest accuracy on validation, of equals the first."""
    return max(ends, key=lambda end: end["validation_accuracy"])


def elapsed_seconds(journal: Path) -> float:
    """How long all attempts took together."""
    return round(sum(line["elapsed_seconds"] for line in read(journal) if line["kind"] == "left"), 3)
