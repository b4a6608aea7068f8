"""What a checkpoint's file says of itself, what is listed of it, and what is restored from it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import MachineError
from pipeline.heartbeat import COMPUTING, FORM, Heartbeat
from pipeline.ranks import Ranks
from pipeline.runs.checkpoints import read_index
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.checkpoint_file import proven, weights_sha256
from pipeline.training.state import State
from tests.unit.training.test_checkpoint import SingleNode, descend, parts

STARTED = '{"kind": "started", "stage": "train", "tags": {}}\n'


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def saved(folder: Path, *steps: int, keep: int = 3, journal: Path | None = None) -> Checkpoints:
    model, optimizer = parts()
    checkpoints = Checkpoints(folder, keep, SingleNode(), journal)
    for step in steps:
        descend(model, optimizer, range(step - 1, step))
        checkpoints.save(step, State(model, optimizer))
    return checkpoints


def listed_steps(folder: Path) -> list[int]:
    index = read_index(folder)
    assert index is not None
    return [entry["step"] for entry in index["checkpoints"]]


def test_an_entry_names_the_file_its_digest_and_what_of_the_journal_it_goes_with(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    figures = [json.dumps({"kind": "metrics", "at": 0, "step": step, "values": {}}) + "\n" for step in (1, 3, 4)]
    journal.write_text(STARTED + "".join(figures))
    saved(tmp_path, 3, journal=journal)
    content = (tmp_path / "step-00000003.safetensors").read_bytes()
    told = [journal.stat().st_size, sha256(journal.read_bytes())]
    expected = {"step": 3, "file": "step-00000003.safetensors", "sha256": sha256(content), "journal": told}
    assert read_index(tmp_path) == {"checkpoints": [expected]}
    assert proven(tmp_path / "step-00000003.safetensors") == {"step": "3", "best": "null", "metrics": "2"}


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    model, optimizer = parts()
    checkpoints = Checkpoints(tmp_path, 3, SingleNode())
    assert checkpoints.restore(State(model, optimizer)) == 0
    checkpoints.save(3, State(model, optimizer))
    path = tmp_path / "step-00000003.safetensors"
    path.unlink()
    checkpoints.save(3, State(model, optimizer))
    assert not path.exists()
    checkpoints.save(4, State(model, optimizer))
    assert list(checkpoints.written()) == [3, 4]
    resumed = Checkpoints(tmp_path, 3, SingleNode())
    assert resumed.restore(State(model, optimizer)) == 4
    resumed.save(4, State(model, optimizer))
    assert list(resumed.written()) == []


def test_no_checkpoint_where_the_journal_tells_of_one_is_an_error(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.write_text('{"kind": "checkpoint", "step": 3}\n')
    with pytest.raises(MachineError, match="no good checkpoint is left, and the journal tells of some"):
        Checkpoints(tmp_path / "checkpoints", 3, SingleNode(), journal).restore(State(*parts()))


def test_a_checkpoint_that_the_journal_does_not_reach_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.write_text(STARTED)
    saved(tmp_path, 3, journal=journal)
    journal.write_text("")
    with pytest.raises(MachineError, match="no good checkpoint is left of 1"):
        Checkpoints(tmp_path, 3, SingleNode(), journal).restore(State(*parts()))


@pytest.mark.parametrize("due", [True, False])
def test_a_validation_that_is_due_is_remembered(due: bool, tmp_path: Path) -> None:
    model, optimizer = parts()
    Checkpoints(tmp_path, 3, SingleNode()).save(3, State(model, optimizer), validation_due=due)
    checkpoints = Checkpoints(tmp_path, 3, SingleNode())
    assert not checkpoints.validation_due
    checkpoints.restore(State(model, optimizer))
    assert checkpoints.validation_due == due
    facts = {"step": "3", "best": "null", "metrics": "0"} | ({"validation_due": "true"} if due else {})
    assert proven(tmp_path / "step-00000003.safetensors") == facts
    assert not Checkpoints(tmp_path, 3, SingleNode()).validation_due


def test_a_save_without_a_word_of_a_validation_has_none_due(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 3)
    checkpoints.restore(State(*parts()))
    assert not checkpoints.validation_due


def test_a_save_beats(tmp_path: Path) -> None:
    class Alone(SingleNode):
        heartbeat = Heartbeat(None)

    model, optimizer = parts()
    Checkpoints(tmp_path, 3, Alone()).save(3, State(model, optimizer))
    _, _, _, phase, beats, _ = FORM.unpack(Alone.heartbeat._shown[: FORM.size])
    assert (phase, beats >= 1) == (COMPUTING, True)


def test_what_was_refused_when_a_run_went_on_is_listed_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 3, 6, 9)
    for step in (6, 9):
        (tmp_path / f"step-{step:08d}.safetensors").write_bytes(b"")
    checkpoints = Checkpoints(tmp_path, 3, SingleNode())
    model, optimizer = parts()
    assert checkpoints.restore(State(model, optimizer)) == 3
    assert f"going on from {tmp_path}/step-00000003.safetensors" in caplog.text
    checkpoints.save(8, State(model, optimizer))
    assert listed_steps(tmp_path) == [3, 8]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003.safetensors", "step-00000008.safetensors"]


def test_the_newest_is_taken_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1, 3)
    assert Checkpoints(tmp_path, 3, SingleNode()).restore(State(*parts())) == 3
    assert caplog.text == ""


def test_without_a_restore_only_older_steps_stay_listed(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 6)
    saved(tmp_path, 4)
    assert listed_steps(tmp_path) == [2, 4]


@pytest.mark.parametrize(
    "build",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    ],
    ids=["sgd", "momentum", "adamw"],
)
def test_every_rank_goes_on_with_the_bits_that_rank_0_saved(
    build: Callable[..., torch.optim.Optimizer], tmp_path: Path, thread_ranks: Callable[..., list[Any]]
) -> None:
    model, optimizer = parts()[0], None
    optimizer = build(model.parameters())
    descend(model, optimizer, range(3))
    start = [(parts()[0], None) for _ in range(2)]
    start = [(one, build(one.parameters())) for one, _ in start]

    def work(group: Ranks) -> int:
        folder = tmp_path / str(group.rank)
        Checkpoints(folder, 3, group).save(3, State(model, optimizer))
        return Checkpoints(folder, 3, group).restore(State(*start[group.rank]))

    assert thread_ranks(2, work) == [3, 3]
    assert not (tmp_path / "1").exists()
    for _, others in start:
        assert others.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
        for index, state in others.state_dict()["state"].items():
            assert state.keys() == optimizer.state_dict()["state"][index].keys()
    descend(model, optimizer, range(3, 6))
    for other, others in start:
        descend(other, others, range(3, 6))
        assert weights_sha256(other.state_dict()) == weights_sha256(model.state_dict())
