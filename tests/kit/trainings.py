"""A training that takes long enough to be hurt: how to follow it, and what it must be equal to."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import psutil

from pipeline.timeouts import STORM_SECONDS
from tests.kit.experiment import Experiment
from tests.kit.waiting import until


def wait_for_step(experiment: Experiment, step: int, process: "subprocess.Popen[str] | None" = None) -> None:
    """Return once the journal has a metric of this step or a later one."""

    def reached() -> bool:
        journals = list((experiment.folder / "runs").glob("*/journal.jsonl"))
        return bool(journals) and any(line["step"] >= step for line in experiment.journal("metrics"))

    until(reached, process, every_seconds=0.02)


def ranks_of(process: "subprocess.Popen[Any]", module: str = "train_rank") -> list[psutil.Process]:
    """The ranks below a launcher, in the order of their numbers."""
    found: dict[int, psutil.Process] = {}
    for one in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, ValueError):
            words = one.cmdline()
            if is_rank(words, module):
                # The last word is "(local rank 1)", and empty ones follow.
                found[int([word for word in words if word][-1].rpartition(" ")[2].rstrip(")"))] = one
    return [found[rank] for rank in sorted(found)]


def is_rank(words: list[str], module: str) -> bool:
    """Whether these are the words of a rank's process, and not of the agent's or of the server that it is forked from."""
    agents = {"pipeline.launch.agent", "pipeline.elastic.agent"}
    return bool({f"pipeline.training.{module}", f"pipeline.elastic.{module}", "tests.kit.faulty"} & {*words}) and not agents & {*words}


@contextlib.contextmanager
def starting_no_rank(process: "subprocess.Popen[Any]") -> Iterator[None]:
    """Below a launcher no rank is forked meanwhile: those that are left form their group before a lost one is back."""
    (server,) = [one for one in psutil.Process(process.pid).children(recursive=True) if "pipeline.forkserver" in one.cmdline()]
    server.suspend()
    try:
        yield
    finally:
        server.resume()


@contextlib.contextmanager
def suspended(process: "subprocess.Popen[Any]", module: str = "train_rank") -> Iterator[list[psutil.Process]]:
    """The ranks of a launcher, stopped (SIGSTOP) so that none can finish meanwhile."""
    ranks = ranks_of(process, module)
    for one in ranks:
        one.suspend()
    try:
        # Before it has stopped, a rank would take a SIGTERM first, which has the lower number, and might end of it.
        until(lambda: all(_has_stopped(one.pid) for one in ranks))
        yield ranks
    finally:
        for one in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.resume()


def signal_twice(process: "subprocess.Popen[Any]", first: int, second: int, ranks: list[psutil.Process]) -> None:
    """Signal a launcher as a person does who does not want to wait: the second is none of a storm of signals, however busy the machine.

    SIGTERM must be pending at its suspended ranks first: then the launcher's time between the two has begun.
    """
    process.send_signal(first)
    until(lambda: all(_pending(one.pid) >> signal.SIGTERM - 1 & 1 for one in ranks), process)
    time.sleep(STORM_SECONDS + 0.5)
    assert process.poll() is None
    process.send_signal(second)


def _has_stopped(pid: int) -> bool:
    """Whether every thread of a process has stopped, or it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] in "TZ" for task in Path(f"/proc/{pid}/task").iterdir())
    return not psutil.pid_exists(pid)


def _pending(pid: int) -> int:
    """The signals that a process has been sent and has not taken, a bit each; none if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("ShdPnd")]
        return int(line.split()[1], 16)
    return 0


def status(experiment: Experiment) -> dict[str, Any]:
    """What status.json says."""
    return json.loads((experiment.run_folder / "status.json").read_text())


def weights(experiment: Experiment) -> str:
    return experiment.json("models/receipt.json")["weights_sha256"]


def mlflow_runs(experiment: Experiment) -> list[mlflow.entities.Run]:
    client = mlflow.MlflowClient(f"sqlite:///{experiment.folder / 'mlflow.db'}")
    return [run for one in client.search_experiments() for run in client.search_runs([one.experiment_id])]


def experiment_steps(experiment: Experiment) -> int:
    return experiment.json("models/receipt.json")["steps"]


def same_figures(experiment: Experiment, other: Experiment, but: str | None = None) -> None:
    """Every figure of learning in receipt and journal is the same, each once."""
    mine, theirs = (one.json("models/receipt.json") for one in (experiment, other))
    for key in {"weights_sha256", "model_sha256", "steps", "best", "epochs", "fingerprint", "data_digest"} - {but}:
        assert mine[key] == theirs[key], key
    figures = [
        [
            (line["step"], name, value)
            for line in one.journal("metrics")
            for name, value in line["values"].items()
            # `dvc repro` evaluates too; what is of one day and one machine is no figure of learning.
            if "per_second" not in name and not name.startswith(("test/", "total/", "system/"))
        ]
        for one in (experiment, other)
    ]
    assert figures[0] == figures[1]
