"""The whole pipeline as a user runs it: every command of the documents, in a clone of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from subprocess import DEVNULL

import mlflow
import psutil
import pytest
import yaml
from safetensors.torch import load_file

from pipeline.tracking.journal import last
from tests.kit.checkout import clone_of, commit
from tests.kit.documents import commands, is_level, listed_model, needs_docker, runnable
from tests.kit.experiment import ROOT, clean_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree as a clone with a small data set, using the environment that the tests run in."""
    folder = clone_of(tmp_path_factory.mktemp("clone") / "lockstep")
    values = yaml.safe_load((folder / "params.yaml").read_text())
    values["data"]["name"] = "synthetic:1200"
    values["train"]["epochs"] = 2
    (folder / "params.yaml").write_text(yaml.safe_dump(values))
    (folder / ".venv").symlink_to(ROOT / ".venv")
    # Older than the environment, so that make does not install it again.
    os.utime(folder / "requirements-dev.lock", (0, 0))
    commit(folder, "small")
    return folder


def environment_of(folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in clean_environment().items() if not name.startswith("PYTHON")}
    return environment | {"PATH": f"{folder / '.venv' / 'bin'}:{environment['PATH']}"}


def run(folder: Path, command: str) -> str:
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment_of(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def runs(folder: Path) -> list[mlflow.entities.Run]:
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    return [found for one in client.search_experiments() for found in client.search_runs([one.experiment_id])]


def show_ui(folder: Path, command: str) -> None:
    """Start it, see MLflow answer, stop it."""
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", 5000)), "something listens on 127.0.0.1:5000 already"
    process = subprocess.Popen(
        command, shell=True, cwd=folder, env=environment_of(folder), stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
    )
    try:
        until = time.monotonic() + 300
        while True:
            try:
                with urllib.request.urlopen("http://127.0.0.1:5000/version", timeout=5) as answer:
                    assert answer.read().decode() == mlflow.__version__
                return
            except OSError:
                assert time.monotonic() < until
                assert process.poll() is None
                time.sleep(0.2)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


class Reader:
    """Someone who types every command of the documents, in their order."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.leading: subprocess.Popen[bytes] | None = None

    def carry_out(self, command: str) -> str:
        """Run one command as it stands there, or what is run in its place; returns what it said."""
        if "pipeline lead" in command:
            # In another shell; without this it would have nothing to do.
            (self.folder / "dvc.lock").unlink()
            self.leading = subprocess.Popen(command, shell=True, cwd=self.folder, env=environment_of(self.folder))
            return ""
        if command.startswith("make ui"):
            show_ui(self.folder, command)
            return ""
        if "model.name=convnet" in command:
            (self.folder / "convnet.py").write_text(listed_model())
        return run(self.folder, runnable(command).replace("~", str(self.folder.parent)))

    def check(self, command: str, said: str) -> None:
        """What the documents say about a command."""
        if command == "make repro":
            assert "test accuracy" in said
            assert [one.info.status for one in runs(self.folder)] == ["FINISHED"]
        if "pipeline verify" in command:
            assert "bit-equal: " in said and "on 1 rank" in said
        if "dist.world_size=4" in command:
            assert "finished already, published again" in said
            assert len(runs(self.folder)) == 1
        if "model.name=convnet" in command:
            (new,) = [one for one in runs(self.folder) if one.data.params["model.name"] == "convnet.py:build"]
            assert new.info.status == "FINISHED"
            assert "test/accuracy" in new.data.metrics
            assert load_file(self.folder / "models" / "model.safetensors")["0.weight"].shape == (32, 1, 3, 3)
        if "-n fleet" in command:
            (new,) = [one for one in runs(self.folder) if one.data.tags.get("dvc.experiment") == "fleet"]
            asked = {"model.name": "resnet18", "train.momentum": "0.9", "train.weight_decay": "0.0001", "train.learning_rate": "0.05"}
            assert new.data.params.items() >= asked.items()
            # What other tests of this clone begin with.
            run(self.folder, "git checkout -q params.yaml")
        if "pipeline join" in command:
            assert self.leading is not None
            assert self.leading.wait(10) == 0
        if command.startswith("install -d"):
            assert (self.folder.parent / ".cache" / "lockstep").stat().st_mode & 0o777 == 0o700
        if command in ("make test", "make faults"):
            assert "pytest" in said
        if command == "make bench":
            assert "ordered / native" in said


def test_every_command_of_the_documents_works_and_the_model_of_the_readme_trains(clone: Path) -> None:
    # What needs an engine is run by tests/containers/test_compose.py.
    found = [one for one in commands() if not (needs_docker(one) or is_level(one))]
    assert {"make repro", "make test", "make ui", "dvc repro", "python -m pipeline doctor", "make bench", "make faults"} <= set(found)
    reader = Reader(clone)
    for command in found:
        reader.check(command, reader.carry_out(command))
    assert [one.info.status for one in runs(clone)] == ["FINISHED"] * 3


def test_a_second_repro_is_up_to_date_within_six_seconds(clone: Path) -> None:
    run(clone, "dvc repro")
    started_at = time.monotonic()
    assert "up to date" in run(clone, "dvc repro")
    assert time.monotonic() - started_at < 6


def test_a_queue_of_six_with_two_workers_loses_none_and_dvc_agrees_with_mlflow(clone: Path) -> None:
    before = {one.info.run_id for one in runs(clone)}
    run(clone, "dvc exp run --queue -S train.epochs=1 -S model.name=mlp -S 'train.learning_rate=0.02,0.05,0.1' -S 'seed=5,6'")
    # Its workers inherit the output, and one of them may stay for good after the last experiment.
    run(clone, "dvc queue start --jobs 2 >/dev/null 2>&1")
    until = time.monotonic() + 600
    while re.search(r" (Queued|Running)$", said := run(clone, "dvc queue status"), re.MULTILINE):
        assert time.monotonic() < until, said
        time.sleep(2)
    started = [(one, one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    workers = [one for one, words in started if "queue-worker" in words and any(str(clone) in word for word in words)]
    for one in psutil.wait_procs(workers, timeout=30)[1]:
        one.kill()
    found = {one.data.tags["dvc.experiment"]: one for one in runs(clone) if one.info.run_id not in before}
    assert len(found) == 6, said
    assert len({one.info.run_name for one in found.values()}) == 6
    assert {one.info.status for one in found.values()} == {"FINISHED"}
    shown = {
        one["name"]: one["revs"][0]["data"]
        for commit in json.loads(run(clone, "dvc exp show --json"))
        for one in commit["experiments"] or ()
    }
    for name, one in found.items():
        # Each worker has a folder of its own, and the run stays in the workspace.
        assert (clone / "runs" / one.data.tags["lockstep.fingerprint"] / "receipt.json").exists()
        train, tested = (shown[name]["metrics"][f"metrics/{stage}.json"]["data"] for stage in ("train", "eval"))
        assert train["best"]["validation_accuracy"] == one.data.metrics["best/validation_accuracy"]
        assert train["last"]["train_loss"] == one.data.metrics["train/loss"]
        assert {f"test/{key}": value for key, value in tested.items() if key != "class_accuracy"}.items() <= one.data.metrics.items()
        params = shown[name]["params"]["params.yaml"]["data"]
        assert one.data.params["train.learning_rate"] == str(params["train"]["learning_rate"])
    run(clone, f"dvc plots diff {' '.join(found)}")
    assert (clone / "dvc_plots" / "index.html").stat().st_size


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.fault(3, "SIGTERM to dvc; SIGKILL of it")
def test_when_dvc_is_killed_training_stops_resumable_and_leaves_no_orphan(number: signal.Signals, clone: Path) -> None:
    changed = clone / "params.yaml"
    before = changed.read_text()
    changed.write_text(before.replace("epochs: 2", f"epochs: {60 + number}"))
    process = subprocess.Popen(["dvc", "repro"], cwd=clone, env=environment_of(clone), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        journal = wait_for_training(clone)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.wait(30)
        # A slow machine takes its time for what MLflow has yet to hear.
        _, alive = psutil.wait_procs(children, timeout=90)
        assert not alive
        status = json.loads((journal.parent / "status.json").read_text())
        assert (status["outcome"], status["exit_code"]) == ("stopped", 75)
        assert Path(status["checkpoint"]).exists()
    finally:
        changed.write_text(before)
    tag = journal.parent.name
    (run,) = [one for one in runs(clone) if one.data.tags["lockstep.fingerprint"] == tag]
    assert run.info.status == "KILLED"


def wait_for_training(clone: Path) -> Path:
    """The journal of the training that is under way, once it has a metric."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        for status in clone.glob("runs/*/status.json"):
            journal = status.parent / "journal.jsonl"
            if json.loads(status.read_text())["outcome"] == "running" and last(journal, "started", "metrics")["kind"] == "metrics":
                return journal
        time.sleep(0.1)
    raise AssertionError("training never began")


def test_dvc_shows_metrics_and_plots(clone: Path) -> None:
    assert "top5_accuracy" in run(clone, "dvc metrics show")
    run(clone, "dvc plots show")
    assert (clone / "dvc_plots" / "index.html").stat().st_size
