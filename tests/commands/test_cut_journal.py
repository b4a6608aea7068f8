"""A disk that loses the end of a journal: what it had comes about again, and is in MLflow once."""

import contextlib
import json
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mlflow
import psutil
import pytest

from pipeline.tracking.journal import read
from pipeline.tracking.mirror_state import read_state, repeat_if_cut, write_state
from tests.commands.test_tracking import ENDED, STARTED, make_journal, metric, mirror, runs
from tests.kit.experiment import PACED, PACED_MODEL, Experiment
from tests.kit.trainings import mlflow_runs
from tests.kit.waiting import until


def in_mlflow(experiment: Experiment) -> list[tuple[str, int]]:
    """The step of every point of every metric."""
    with contextlib.closing(sqlite3.connect(experiment.folder / "mlflow.db")) as store:
        return store.execute("select key, step from metrics").fetchall()


def journaled(path: Path) -> list[tuple[str, int]]:
    return [(name, line["step"]) for line in read(path) if line["kind"] == "metrics" for name in line["values"]]


@pytest.mark.slow
@pytest.mark.fault(32, "a disk that loses the end of the journal after a stop")
def test_figures_that_a_cut_journal_has_lost_are_in_mlflow_once(experiment: Experiment) -> None:
    experiment.set(model__name="mlp").run("prepare")
    experiment.run("train", "--stop-after-epochs", "1", expect=75)
    path = experiment.run_folder / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    # A checkpoint's line comes when its file is written, which may be after the figures of later steps.
    last = max(number for number, line in enumerate(lines) if b"train/loss" in line)
    path.write_bytes(b"".join(lines[:last]) + b'{"kind": "metr')
    lost = set(in_mlflow(experiment)) - set(journaled(path))
    assert {name for name, _ in lost} >= {"train/loss", "validation/loss"}
    experiment.run("train")
    experiment.run("evaluate")
    assert set(Counter(in_mlflow(experiment)).values()) == {1}
    assert sorted(journaled(path)) == sorted(in_mlflow(experiment))


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["by a stage", "by a mirror"])
def test_a_cut_journal_that_has_grown_beyond_its_old_end_is_repeated_whole(seen: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    make_journal(tmp_path, STARTED, *(metric(step) for step in range(20)), ("stopped", {"step": 19}))
    mirror(tmp_path)
    size = path.stat().st_size
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-3]))
    if seen == "by a stage":
        repeat_if_cut(tmp_path)
    else:
        # As `sync` does.
        mirror(tmp_path)
    # A line ends where the journal ended.
    length = size - path.stat().st_size - len(json.dumps({"kind": "note", "at": 10**12, "text": ""})) - 1
    make_journal(tmp_path, ("note", {"text": "n" * length}))
    # It is sent from its beginning, and what comes later by another mirror.
    mirror(tmp_path)
    make_journal(tmp_path, metric(18), metric(19), metric(20), ENDED)
    mirror(tmp_path)
    (run,) = runs(tmp_path)
    history = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_metric_history(run.info.run_id, "train/loss")
    assert sorted((one.step, one.value) for one in history) == [(step, 1 / (step + 1)) for step in range(21)]
    assert run.info.status == "FINISHED"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-3]))
    # What MLflow has beyond it is not lost.
    mirror(tmp_path)
    assert [run.info.status for run in runs(tmp_path)] == ["KILLED"]


@pytest.mark.slow
def test_another_runs_journal_in_its_place_is_sent_whole(tmp_path: Path) -> None:
    make_journal(tmp_path, STARTED, *(metric(step) for step in range(20)), ENDED)
    mirror(tmp_path)
    write_state(tmp_path, replace(read_state(tmp_path), repeated=True))
    (tmp_path / "journal.jsonl").unlink()
    make_journal(tmp_path, STARTED, *(metric(step) for step in range(10)), ENDED, identity="another")
    mirror(tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    points = {run.data.tags["lockstep.run"]: len(client.get_metric_history(run.info.run_id, "train/loss")) for run in runs(tmp_path)}
    assert points == {"0123456789abcdef": 20, "another": 10}


@pytest.mark.slow
def test_a_run_that_goes_on_from_another_is_one_in_mlflow_also_if_it_had_begun(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    (tmp_path / "mine.py").write_text(PACED_MODEL)
    experiment = Experiment(tmp_path).with_database()
    experiment.set(**PACED | {"train__epochs": 2, "checkpoint__every_steps": 1000}).run("prepare")
    experiment.run("train", "--stop-after-epochs", "1", expect=75)
    (source,) = (tmp_path / "runs").glob("*")
    experiment.set(**PACED | {"train__epochs": 2, "checkpoint__every_steps": 1000}, dist__strategy="allreduce")
    slow.touch()
    process = experiment.start("train", SLOW_FILE=str(slow), SLOW_SECONDS="100")
    # Whoever asks all the time takes the CPU from the mirror, which has what others leave.
    until(lambda: len(mlflow_runs(experiment)) == 2, process, 240, 1)
    everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for act in ("suspend", "kill"):
        for one in everybody:
            getattr(one, act)()
    process.communicate()
    (begun,) = (one for one in (tmp_path / "runs").glob("*") if one != source)
    assert not list((begun / "checkpoints").glob("step-*"))
    slow.unlink()
    # No part of the experiment, but a parameter in MLflow.
    experiment.set(**PACED | {"train__epochs": 2, "checkpoint__every_steps": 500}, dist__strategy="allreduce")
    assert "with the same bits" in experiment.run("train", "--resume", str(source))
    runs = mlflow_runs(experiment)
    assert sorted(one.info.status for one in runs) == ["FINISHED", "KILLED"]
    (whole,) = (one for one in runs if one.info.status == "FINISHED")
    assert whole.data.tags["lockstep.resumed_from"] == source.name
    assert [one.dataset.name for one in whole.inputs.dataset_inputs] == ["synthetic:6000"]
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        kept = store.execute("select key, step from metrics where run_uuid = ?", [whole.info.run_id]).fetchall()
    assert sorted(kept) == sorted(journaled(begun / "journal.jsonl"))
