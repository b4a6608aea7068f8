"""What a stage leaves in status.json where no rank came to run."""

import json
from pathlib import Path

import pytest

from pipeline import train
from pipeline.config import ConfigError, DataError, PeerError
from pipeline.config.params import load
from pipeline.files import Paths
from pipeline.runs.status import Outcome
from pipeline.stage import errors_in_status
from tests.kit.experiment import make_job
from tests.kit.finished import finish, pretend


@pytest.mark.parametrize(
    ("error", "name", "code"), [(DataError("bad"), "data", 3), (ConfigError("bad"), "configuration", 2), (PeerError("bad"), "failed", 6)]
)
def test_an_error_before_the_ranks_is_in_the_status(tmp_path: Path, error: Exception, name: str, code: int) -> None:
    job, paths = make_job(tmp_path), Paths(tmp_path / "params.yaml")
    job.run.mkdir()
    Outcome("stopped", 75, "", None, 3, None, "dvc repro").write(job.run)
    with pytest.raises(type(error)), errors_in_status(job, "train", paths):
        raise error
    found = json.loads((job.run / "status.json").read_text())
    assert (found["outcome"], found["exit_code"], found["cause"], found["command"]) == (
        name,
        code,
        "bad",
        f"python -m pipeline train --params {paths.params}",
    )


def test_a_finished_run_that_could_not_say_so_says_it_when_it_is_published_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    run = finish(tmp_path)
    Outcome("running", None, "", None, 1, None, "dvc repro").write(run)
    assert train.run(load(tmp_path / "params.yaml"), Paths(tmp_path / "params.yaml")) == 0
    assert json.loads((run / "status.json").read_text())["outcome"] == "done"
