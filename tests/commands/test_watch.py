"""Watch: a second terminal shows a training while it runs, and how it ended."""

import itertools
import shutil
import signal
from pathlib import Path

import pytest

from pipeline import watch
from pipeline.config import Config, ConfigError
from pipeline.files import Paths
from pipeline.tracking.journal import Journal
from tests.kit.experiment import LONGER, Experiment
from tests.kit.finished import finish, pretend
from tests.kit.trainings import wait_for_step


@pytest.mark.slow
def test_a_training_is_watched_until_it_stops(experiment: Experiment) -> None:
    experiment.set(**LONGER).run("prepare")
    training = experiment.start("train")
    wait_for_step(experiment, 20, training)
    watching = experiment.start("watch")
    assert watching.stdout is not None
    # It may begin when epochs are over: the training is stopped behind the first one that it has seen.
    seen = list(itertools.takewhile(lambda line: not line.startswith("epoch "), watching.stdout))
    assert watching.poll() is None, seen
    training.send_signal(signal.SIGINT)
    training.communicate(timeout=60)
    said, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0, said
    first, second = seen[:2]
    assert first.startswith(f"{experiment.run_folder}: lenet on synthetic:6000")
    assert second.startswith("step ") and ", train/loss " in second
    assert said.splitlines()[-1].startswith("train: stopped: stopped on request at step ")


def test_a_finished_run_is_told_and_nothing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    run, paths = finish(tmp_path), Paths(tmp_path / "params.yaml")
    assert watch.run(Config(), paths, None) == 0
    said = capsys.readouterr().err
    assert "step 3 of " in said
    assert "validation/accuracy 0.75" in said
    assert said.splitlines()[-1] == "train: done"
    # Other data may be prepared by now, or none.
    shutil.rmtree(paths.prepared, ignore_errors=True)
    assert watch.run(Config(), paths, None) == 0
    assert "step 3 of " in capsys.readouterr().err
    with pytest.raises(ConfigError, match="nothing: no such file or folder"):
        watch.run(Config(), paths, tmp_path / "nothing")
    (run / "status.json").write_text('{"outcome": "running", "process": "999999999 on elsewhere", "stage": "train"}')
    assert watch.is_running(watch.status(run))
    assert watch.ending(watch.status(run)) == "killed: nobody works on it, and it has no ending"
    (run / "status.json").write_text("{")
    assert not watch.is_running(watch.status(run))
    assert watch.ending(watch.status(run)) == "it has not begun"


def test_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is there; run: python -m pipeline train"):
        watch.run(Config(), Paths(tmp_path / "params.yaml"), None)


def test_the_step_of_an_evaluated_run_is_its_last_and_not_that_of_its_best_model(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for step, values in ((10, {"validation/accuracy": 0.9}), (20, {"validation/accuracy": 0.8}), (10, {"test/accuracy": 0.7})):
        journal.event("metrics", step=step, values=values)
    journal.close()
    assert watch.so_far(tmp_path / "journal.jsonl", 20) == "step 20 of 20, validation/accuracy 0.8, test/accuracy 0.7"
