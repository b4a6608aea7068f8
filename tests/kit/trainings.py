"""A training that takes long enough to be hurt: how to follow it, and what it must be equal to."""

import contextlib
import subprocess
import time

import mlflow
import psutil

from tests.kit.experiment import Experiment


def wait_for_step(experiment: Experiment, step: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()[0]
        if list((experiment.folder / "runs").glob("*/journal.jsonl")) and any(
            line["step"] >= step for line in experiment.journal("metrics")
        ):
            return
        time.sleep(0.02)
    raise AssertionError("the step was never reached")


def ranks_of(process: subprocess.Popen[str], module: str = "train_rank") -> list[psutil.Process]:
    found = []
    for one in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = one.cmdline()
            if (f"pipeline.training.{module}" in words or "tests.kit.faulty" in words) and "pipeline.launch.agent" not in words:
                found.append(one)
    return found


def weights(experiment: Experiment) -> str:
    return experiment.json("models/receipt.json")["weights_sha256"]


def mlflow_runs(experiment: Experiment) -> list[mlflow.entities.Run]:
    client = mlflow.MlflowClient(f"sqlite:///{experiment.folder / 'mlflow.db'}")
    return [run for one in client.search_experiments() for run in client.search_runs([one.experiment_id])]


def experiment_steps(experiment: Experiment) -> int:
    return experiment.json("models/receipt.json")["steps"]


def same_figures(experiment: Experiment, other: Experiment) -> None:
    """Every figure of learning in receipt and journal is the same, each once."""
    mine, theirs = (one.json("models/receipt.json") for one in (experiment, other))
    for key in ("weights_sha256", "model_sha256", "steps", "best", "epochs", "fingerprint", "data_digest"):
        assert mine[key] == theirs[key], key
    figures = [
        [
            (line["step"], name, value)
            for line in one.journal("metrics")
            for name, value in line["values"].items()
            if "per_second" not in name
        ]
        for one in (experiment, other)
    ]
    assert figures[0] == figures[1]
