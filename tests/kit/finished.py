"""A finished experiment in milliseconds: the product writes every file of a training but those that its ranks would compute."""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pipeline import evaluate, prepare, train
from pipeline.config.params import load
from pipeline.console import Progress
from pipeline.files import Paths, atomic_write, write_checksummed_json
from pipeline.runs import status
from pipeline.stage import RankStage
from pipeline.tracking.journal import CHECKPOINT, Journal, metrics_by_step
from pipeline.tracking.mirror_process import MirrorProcess, server_and_credentials
from pipeline.tracking.mirror_state import State, server_id, write_state
from tests.kit.experiment import Experiment

PNG = b"\x89PNG"


def leave(run: Path, journal: Journal) -> None:
    """What ranks leave of three steps."""
    for step in (1, 2, 3):
        values = {"train/loss": 1 / step, "train/accuracy": 0.5, "train/learning_rate": 0.1, "train/samples": 48.0 * step}
        journal.metrics(values | {"validation/loss": 1 / step, "validation/accuracy": step / 4}, step)
    entries = []
    for kind, step in (("step", 3), ("best", 3)):
        path = run / "checkpoints" / f"{kind}-{step:08d}.safetensors"
        atomic_write(path, f"{kind} {step}".encode())
        entries.append({"step": step, "accuracy": 0.75, "file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    write_checksummed_json(run / "checkpoints" / "index.json", {"checkpoints": entries[:1], "best": entries[1]})
    journal.event(CHECKPOINT, step=3)
    atomic_write(run / "model.safetensors", b"best 3")
    atomic_write(run / "model.pt2", b"a program")
    journal.event("finished", step=3, weights_sha256="0" * 64)


class Pretended(RankStage):
    """A stage whose ranks take no time while it `trains`, and else do nothing; `started` tells how often they would have been started."""

    started, trains = 0, True

    def run(
        self, module: str, header: dict[str, Any], tags: dict[str, Any], progress: Progress, publish: Callable[[Journal, str | None], str]
    ) -> int:
        journal, run = self._opened(header, tags), self._job.run
        Pretended.started += 1
        if self.trains:
            leave(run, journal)
            publish(journal, lambda: None)
            journal.event("ended", stage="train", outcome="done", cause="")
            status.Outcome("done", 0, "", None, 3, None, "").write(run)
        journal.close()
        return 0


class NoMirror(MirrorProcess):
    """A mirror that has nothing to say."""

    def __init__(self, run: Path, paths: Paths, patient: bool = False):
        server_and_credentials(paths)

    def finish(self, hurried: Any, announce: Any, stopped: bool = False) -> str | None:
        return None

    def wait(self) -> str | None:
        return None


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no process for ranks or mirror, draw nothing, and ask only once for what does not change."""
    for name in ("__main__.parser", "runs.source._file", "runs.identity.version", "train._version", "tracking.receipt.git_state"):
        place, _, function = name.rpartition(".")
        module = import_module(f"pipeline.{place}")
        monkeypatch.setattr(module, function, cache(getattr(module, function)))
    for module in (train, evaluate):
        monkeypatch.setattr(module, "RankStage", Pretended)
    for name in ("pipeline.train.MirrorProcess", "pipeline.sync.MirrorProcess"):
        monkeypatch.setattr(name, NoMirror)

    def draw(journal: Path, folder: Path) -> None:
        metrics_by_step(journal)
        atomic_write(folder / "curves.png", PNG)

    monkeypatch.setattr("pipeline.report.plots.curves", draw)


def finish(folder: Path, done: bool = True, **changes: Any) -> Path:
    """Make an experiment that is finished and mirrored, or then stopped; returns its run's folder. `pretend` comes first."""
    folder.mkdir(parents=True, exist_ok=True)
    Pretended.trains = True
    experiment = Experiment(folder).set(**({"data__name": "synthetic:200", "dist__batch_size_per_gpu": 8} | changes))
    config, paths = load(experiment.params), Paths(experiment.params)
    prepare.run(config, paths)
    assert train.run(config, paths) == 0
    Pretended.trains = False
    run = experiment.run_folder
    (run / "logs").mkdir()
    uri, _ = server_and_credentials(paths)
    size_bytes = (run / "journal.jsonl").stat().st_size
    write_state(run, State("0" * 32, "1", size_bytes, None, server_id(uri)))
    if not done:
        # As it is after a stop.
        for name in ("receipt.json", "model.safetensors", "model.pt2"):
            (run / name).unlink()
        lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
        (run / "journal.jsonl").write_bytes(b"".join(line for line in lines if b'"finished"' not in line and b'"ended"' not in line))
    assert json.loads((folder / "models" / "receipt.json").read_text())["fingerprint"] == run.name
    return run
