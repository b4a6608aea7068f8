"""Journal and mirror: what is written once is in MLflow once, with its own times, however often it is sent."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest

from pipeline.tracking import receipt
from pipeline.tracking.journal import Journal, Tail, last, read
from pipeline.tracking.mirror_state import read_state
from tests.kit.experiment import ROOT, Experiment


def test_a_torn_line_is_not_read_and_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.metrics({"train/loss": 0.5}, 1)
    journal.close()
    with path.open("a") as file:
        file.write('{"kind": "metrics", "step": 2, "val')
    assert [line["step"] for line in read(path)] == [1]
    journal = Journal(path)
    journal.metrics({"train/loss": 0.25}, 2)
    journal.close()
    assert [(line["step"], line["values"]) for line in read(path)] == [(1, {"train/loss": 0.5}), (2, {"train/loss": 0.25})]


def test_a_value_that_was_written_before_a_restart_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path)
    first.metrics({"train/loss": 0.5}, 10)
    again = Journal(path)
    again.metrics({"train/loss": 0.5, "validation/loss": 0.6}, 10)
    again.metrics({"train/loss": 0.4}, 20)
    assert [(line["step"], line["values"]) for line in read(path)] == [
        (10, {"train/loss": 0.5}),
        (10, {"validation/loss": 0.6}),
        (20, {"train/loss": 0.4}),
    ]
    first.close()
    again.close()


def test_a_tail_gives_every_line_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    tail = Tail(path)
    assert list(tail) == []
    journal = Journal(path)
    for step in (1, 2, 3):
        journal.metrics({"train/loss": 1.0}, step)
        assert [line["step"] for line in tail] == [step]
    journal.close()
    assert tail.offset == path.stat().st_size


def make_journal(run: Path, *events: tuple[str, dict], identity: str = "0123456789abcdef") -> None:
    journal = Journal(run / "journal.jsonl")
    first = {"experiment": "tests", "artifacts": (run / "artifacts").as_uri(), "name": "a run", "params": {"seed": 1}, "tags": {}}
    if not last(run / "journal.jsonl", "run"):
        journal.event("run", id=identity, **first)
    for kind, fields in events:
        if kind == "metrics":
            journal.metrics(fields["values"], fields["step"])
        else:
            journal.event(kind, **fields)
    journal.close()


def mirror(run: Path, expect: int = 0, **environment: str) -> str:
    command = [sys.executable, "-m", "pipeline.tracking.mirror", str(run)]
    uri = {"MLFLOW_TRACKING_URI": f"sqlite:///{run / 'mlflow.db'}"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | uri | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == expect, done.stderr
    return done.stderr


def runs(run: Path) -> list[mlflow.entities.Run]:
    client = mlflow.MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    return [found for one in client.search_experiments() for found in client.search_runs([one.experiment_id])]


STARTED = ("started", {"stage": "train", "tags": {"lockstep.world_size": "2"}})
ENDED = ("ended", {"stage": "train", "outcome": "done", "cause": ""})


def metric(step: int) -> tuple[str, dict]:
    return "metrics", {"values": {"train/loss": 1 / (step + 1)}, "step": step}


@pytest.mark.slow
def test_what_was_sent_before_is_in_mlflow_once(tmp_path: Path) -> None:
    make_journal(tmp_path, STARTED, *(metric(step) for step in range(2000)), ENDED)
    mirror(tmp_path)
    # As after a kill between sending and noting it.
    (tmp_path / "mirror.json").unlink()
    mirror(tmp_path)
    (run,) = runs(tmp_path)
    history = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in sorted(history, key=lambda one: one.step)] == [(step, 1 / (step + 1)) for step in range(2000)]
    assert [one.timestamp for one in history] == [line["at"] for line in read(tmp_path / "journal.jsonl") if line["kind"] == "metrics"]
    assert run.info.status == "FINISHED"
    assert run.info.run_id == read_state(tmp_path).run_id


@pytest.mark.slow
def test_mirrors_that_start_at_once_on_a_new_database_do_not_break_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline.tracking.mirror"]
    uri = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    processes = []
    for number in range(3):
        folder = tmp_path / str(number // 2)
        if number != 1:
            folder.mkdir()
            make_journal(folder, STARTED, metric(1), ENDED, identity=f"run {number}")
        process = subprocess.Popen(
            [*command, str(folder)], cwd=ROOT, env=os.environ | uri, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        processes.append(process)
    for process in processes:
        # Without a limit of its own: they run at nice 19, and get little of the CPU while other tests run.
        _, said = process.communicate()
        assert process.returncode == 0, said.decode()
    # Two of the three mirrored the same run.
    assert sorted(run.data.tags["lockstep.run"] for run in runs(tmp_path)) == ["run 0", "run 2"]


@pytest.mark.slow
def test_a_run_without_an_ending_is_killed_and_runs_again_when_it_goes_on(tmp_path: Path) -> None:
    make_journal(tmp_path, STARTED, metric(1))
    mirror(tmp_path)
    assert [run.info.status for run in runs(tmp_path)] == ["KILLED"]
    make_journal(tmp_path, STARTED, metric(2), ("ended", {"stage": "train", "outcome": "failed", "cause": "rank 1"}))
    mirror(tmp_path)
    (run,) = runs(tmp_path)
    assert run.info.status == "FAILED"
    assert run.data.tags["lockstep.outcome"] == "failed"


@pytest.mark.slow
def test_a_dead_server_costs_training_nothing_and_sync_catches_up(experiment: Experiment) -> None:
    experiment.set(model__name="mlp").run("prepare")
    dead = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    said = experiment.run("train", **dead)
    assert "MLflow does not have all of it yet" in said
    assert "python -m pipeline sync" in said
    assert experiment.json("models/receipt.json")["mlflow_run_id"] is None
    assert "MLflow has all of it" in experiment.run("sync")
    (run,) = runs(experiment.folder)
    assert run.info.status == "FINISHED"
    assert run.data.tags["lockstep.run"] == experiment.json("models/receipt.json")["journal"]
    assert "MLflow" not in experiment.run("sync")


@pytest.mark.slow
@pytest.mark.fault(18, "SIGKILL of a lone mirror; then sync")
def test_sync_marks_a_run_that_lost_its_launcher_and_its_mirror(experiment: Experiment) -> None:
    """A power cut: nobody was left to say how it ended."""
    run = experiment.folder / "runs" / "0123456789abcdef"
    run.mkdir(parents=True)
    make_journal(run, STARTED, metric(1))
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.tracking.mirror", str(run)],
        cwd=ROOT,
        env=os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{experiment.folder / 'mlflow.db'}"},
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    while read_state(run).offset < (run / "journal.jsonl").stat().st_size:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [one.info.status for one in runs(experiment.folder)] == ["RUNNING"]
    experiment.run("sync")
    assert [one.info.status for one in runs(experiment.folder)] == ["KILLED"]


def test_losses_in_a_receipt_lose_no_bit(tmp_path: Path) -> None:
    value = 0.1 + 0.2
    make_journal(
        tmp_path, ("metrics", {"values": {"train/loss": value, "validation/loss": value / 3, "validation/accuracy": 0.5}, "step": 7})
    )
    (end,) = receipt.epochs(tmp_path / "journal.jsonl")
    assert float.fromhex(end["train_loss"]) == value
    assert float.fromhex(end["validation_loss"]) == value / 3


def test_the_commit_and_whether_the_tree_differs_are_those_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.setenv("LOCKSTEP_COMMIT", "0123abc")
    assert receipt.git_state(tmp_path) == {"commit": "0123abc", "dirty": None}
    git("init", "--quiet")
    assert receipt.git_state(tmp_path) == {"commit": None, "dirty": None}
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "one.py").write_text("1\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    commit = git("rev-parse", "HEAD")
    assert receipt.git_state(tmp_path) == {"commit": commit, "dirty": False}
    # What a run writes changes with every run.
    (tmp_path / "dvc.lock").write_text("of a run")
    # The receipt has the parameters.
    (tmp_path / "params.yaml").write_text("seed: 2")
    assert receipt.git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "pipeline" / "one.py").write_text("2\n")
    assert receipt.git_state(tmp_path) == {"commit": commit, "dirty": True}


@pytest.mark.slow
def test_a_run_that_mlflow_has_lost_is_sent_anew(tmp_path: Path) -> None:
    make_journal(tmp_path, STARTED, *(metric(step) for step in range(20)), ENDED)
    mirror(tmp_path)
    (first,) = runs(tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    database = sqlite3.connect(tmp_path / "mlflow.db")
    for (table,) in database.execute(
        "select m.name from sqlite_master m, pragma_table_info(m.name) c where c.name = 'run_uuid'"
    ).fetchall():
        database.execute(f"delete from {table} where run_uuid = ?", (first.info.run_id,))
    database.commit()
    database.close()
    with pytest.raises(mlflow.MlflowException, match="not found"):
        client.get_run(first.info.run_id)
    mirror(tmp_path)
    (again,) = runs(tmp_path)
    assert again.info.run_id != first.info.run_id
    assert again.data.metrics == first.data.metrics
    assert (again.data.params, again.data.tags, again.info.status) == (first.data.params, first.data.tags, "FINISHED")
