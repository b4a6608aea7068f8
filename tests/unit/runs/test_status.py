"""How a run ended: status.json for programs, one line for people."""

import json
import os
import socket
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from pipeline.runs.status import INTERRUPTED, STOPPED, TERMINATED, Outcome, StopRequested, message, running

STOP = Outcome("stopped", 75, "stopped on request at step 20", None, 20, "runs/a/checkpoints/step-00000020.safetensors", "dvc repro")


def status(run: Path) -> dict[str, object]:
    text = (run / "status.json").read_text()
    assert text.endswith("}\n")
    return json.loads(text)


def test_the_exit_codes_of_a_stop_are_those_of_shells_and_of_sysexits() -> None:
    assert (STOPPED, INTERRUPTED, TERMINATED) == (os.EX_TEMPFAIL, 128 + 2, 128 + 15)


def test_an_ending_is_written_whole_and_for_reading(tmp_path: Path) -> None:
    STOP.write(tmp_path)
    assert status(tmp_path) == {
        "outcome": "stopped",
        "exit_code": 75,
        "cause": "stopped on request at step 20",
        "rank": None,
        "step": 20,
        "checkpoint": "runs/a/checkpoints/step-00000020.safetensors",
        "command": "dvc repro",
        "process": None,
        "stage": "train",
    }
    assert (tmp_path / "status.json").read_text().splitlines()[1] == '  "outcome": "stopped",'
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("before", ["", "x" * 2000], ids=["shorter", "longer"])
def test_where_no_new_file_can_be_written_the_old_one_takes_the_ending(before: str, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(before)
    # In the place of the new file, which so cannot be written, as on a full disk.
    (tmp_path / ".status.json.partial").mkdir()
    STOP.write(tmp_path)
    assert status(tmp_path)["outcome"] == "stopped"


def test_a_run_under_way_names_its_process(tmp_path: Path) -> None:
    running(tmp_path, 40, "again", "evaluate")
    expected = {"outcome": "running", "exit_code": None, "cause": "", "rank": None, "step": 40, "checkpoint": None, "command": "again"}
    assert status(tmp_path) == expected | {"process": f"{os.getpid()} on {socket.gethostname()}", "stage": "evaluate"}


def test_people_are_told_the_cause_what_is_kept_and_how_to_go_on() -> None:
    assert message(STOP) == ("stopped on request at step 20. Kept: runs/a/checkpoints/step-00000020.safetensors. To go on: dvc repro")
    # Killed before it could journal the checkpoint.
    assert message(STOP, has_saved=False) == message(STOP)
    nothing = replace(STOP, checkpoint=None)
    assert message(nothing) == "stopped on request at step 20. To go on: dvc repro"
    assert message(nothing, has_saved=False) == "stopped on request at step 20. No checkpoint was written yet. To start: dvc repro"
    assert message(replace(nothing, stage="evaluate"), has_saved=False) == message(nothing)
    assert message(replace(STOP, checkpoint=None, command="")) == "stopped on request at step 20."


@pytest.mark.parametrize("outcome", ["configuration", "data", "machine"])
def test_a_cause_that_names_its_cure_stands_alone(outcome: str) -> None:
    assert message(replace(STOP, outcome=outcome)) == STOP.cause


def test_an_ending_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        STOP.step = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_stop_request_ends_with_75() -> None:
    assert StopRequested.exit_code == 75
