"""The watch command: how a run fares, from any other terminal: it reads the journal, and touches nothing."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from pipeline.config import Config, ConfigError
from pipeline.console import Progress
from pipeline.data import store
from pipeline.files import Paths
from pipeline.runs.claim import read_claim
from pipeline.tracking import journal as journals

PAUSE_SECONDS = 0.25
LAST = ("train/loss", "train/accuracy", "train/images_per_second", "validation/loss", "validation/accuracy", "test/accuracy")


def run(_: Config, paths: Paths, result: Path | None) -> int:
    """Show where a run is and what it has come to, until it ends; by default the run whose journal was written last."""
    folder = result or newest(paths.runs)
    claim, journal = read_claim(folder, paths.runs), folder / "journal.jsonl"
    if not journal.exists():
        raise ConfigError(f"{folder}: is not the folder of a run; name one such as runs/0123456789abcdef")
    # Of the run's own data: others may be prepared by now. Only the first journals do not say.
    counts = journals.last(journal, "run").get("dataset", {}).get("counts") or store.read_manifest(paths.prepared).counts
    per_epoch = max(1, counts["train"] // claim.config.dist.images_per_step)
    progress = Progress(journal, per_epoch * claim.config.train.epochs, per_epoch)
    progress.say(f"{folder}: {journals.last(journal, 'run').get('name', '')}")
    progress.say(so_far(journal, per_epoch * claim.config.train.epochs))
    with progress:
        while is_running(status(folder)):
            progress.tick()
            time.sleep(PAUSE_SECONDS)
        progress.tick()
    progress.say(ending(status(folder)))
    return 0


def newest(runs: Path) -> Path:
    """Return the run whose journal was written last."""
    found = sorted(runs.glob("*/journal.jsonl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(f"{runs}: no run is there; run: python -m pipeline train")
    return found[-1].parent


def so_far(journal: Path, total: int) -> str:
    """The newest of all figures, in one line."""
    steps = journals.metrics_by_step(journal)
    figures = {name: value for values in steps.values() for name, value in values.items()}
    told = [f"{name} {figures[name]:,.4g}" for name in LAST if name in figures]
    return f"step {max(steps, default=0)} of {total}" + "".join(f", {one}" for one in told)


def status(folder: Path) -> dict[str, Any]:
    """What status.json says; nothing if it is not there, or damaged."""
    try:
        found = json.loads((folder / "status.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def is_running(found: dict[str, Any]) -> bool:
    """Return True if whoever works on it lives, as far as this machine can tell."""
    pid, _, host = str(found.get("process")).partition(" on ")
    return found.get("outcome") == "running" and (host != socket.gethostname() or (pid.isdecimal() and psutil.pid_exists(int(pid))))


def ending(found: dict[str, Any]) -> str:
    """How a run ended that nobody works on."""
    if found.get("outcome") == "running":
        return "killed: nobody works on it, and it has no ending"
    return ": ".join(str(found[name]) for name in ("stage", "outcome", "cause") if found.get(name)) or "it has not begun"
