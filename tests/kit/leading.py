"""A leader and workers without containers: several commands on one machine, each with files of its own."""

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil

from tests.kit.compose import free_port
from tests.kit.experiment import Experiment
from tests.kit.waiting import until

# Long enough to be interrupted, with a global batch that three ranks can share.
LONG = {"data__name": "synthetic:3000", "train__epochs": 8, "dist__batch_size_per_gpu": 96}


def experiment_in(folder: Path, model: str = "", **changes) -> Experiment:
    folder.mkdir()
    (folder / "mine.py").write_text(model)
    return Experiment(folder).set(**changes)


class Job:
    """A leader's training and its workers, each in a folder of its own."""

    def __init__(self, folder: Path, workers: int = 1, model: str = "", **changes):
        self.port, self._workers = free_port(), workers
        self.leading = experiment_in(folder / "leader", model, **changes).with_database()
        self._folder, self._model, self._changes, self._joined = folder, model, changes, 0
        self._leader: subprocess.Popen[str] | None = None
        self.leading.run("prepare")

    def lead(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        words = words or (sys.executable, "-m", "pipeline", "train", "--params", str(self.leading.params))
        self._leader = self.leading.start("lead", "--workers", str(self._workers), "--port", str(self.port), *words, **environment)
        return self._leader

    def join(self, **environment: str) -> subprocess.Popen[str]:
        self._joined += 1
        own = experiment_in(self._folder / f"worker-{self._joined}", self._model, **self._changes)
        return own.start("join", f"127.0.0.1:{self.port}", **environment)

    def wait_for_steps(self, count: int, seconds: float = 120) -> None:
        def lines() -> int:
            journals = (self.leading.folder / "runs").glob("*/journal.jsonl")
            return sum(journal.read_text().count("train/loss") for journal in journals)

        until(lambda: lines() >= count, self._leader, seconds, every_seconds=0.05)


def end(process: subprocess.Popen[str], seconds: float = 200) -> tuple[int, str]:
    said, _ = process.communicate(timeout=seconds)
    return process.returncode, said


def runs_below(process: subprocess.Popen[str], program: str) -> bool:
    found = []
    for one in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += one.cmdline()[:1]
    return program in found


def digest(experiment: Experiment) -> str:
    return experiment.json("models/receipt.json")["weights_sha256"]


def ranks_below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [one for one in psutil.Process(process.pid).children(recursive=True) if "pipeline.training.train_rank" in one.cmdline()[1:4]]
