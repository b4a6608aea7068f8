"""The loop and the checkpoints that are written beside it."""

import logging
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.tracking.journal import CHECKPOINT, Journal, Notes, read
from pipeline.training import checkpoint, loop
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.clipping import Clipping
from pipeline.training.evaluation import Result
from pipeline.training.guard import Diverged, NonFiniteGuard
from pipeline.training.schedule import Schedule
from pipeline.training.state import State
from tests.kit.lossy_training import Gradients, OnlyRank, Stop, parts

STEPS = loop.Steps(total=6, per_epoch=6, per_log=1, per_checkpoint=2, global_batch=8)


class Breaking(Gradients):
    """A gradient is NaN in one step."""

    def __init__(self, model: torch.nn.Module, bad_step: int):
        super().__init__(model)
        self._bad_step = bad_step

    def backward(self, step: int) -> Gradients:
        super().backward(step)
        if step == self._bad_step:
            next(self._model.parameters()).grad.fill_(math.nan)
        return self


@contextmanager
def made(folder: Path, bad_step: int = -1, most: float | None = None) -> Iterator[loop.Parts]:
    """What a loop is made of."""
    state, journal = State(*parts()), Journal(folder / "journal.jsonl")
    with ThreadPoolExecutor(1) as executor:
        try:
            yield loop.Parts(
                strategy=Breaking(state.model, bad_step),
                state=state,
                guard=NonFiniteGuard(state, OnlyRank(), lambda step: ""),
                clipping=Clipping(state, OnlyRank(), most),
                schedule=Schedule("constant", 0.1, 0, STEPS.total),
                checkpoints=Checkpoints(folder / "checkpoints", 9, OnlyRank(), folder / "journal.jsonl", executor),
                journal=journal,
                stop=Stop(None),
                validate=lambda: Result(0.5, 5, 10, 10, torch.zeros(2, 2)),
            )
        finally:
            journal.close()


def run(folder: Path, bad_step: int = -1) -> list[dict[str, Any]]:
    """Train; returns the journal."""
    with made(folder, bad_step) as those:
        loop.run(STEPS, those)
    return list(read(folder / "journal.jsonl"))


def test_a_checkpoint_is_journaled_while_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = checkpoint.Checkpoints.written

    def waiting(self: Checkpoints) -> Any:
        """As if a step took longer than a write."""
        for one in self._pending:
            one.result(30)
        return written(self)

    monkeypatch.setattr(checkpoint.Checkpoints, "written", waiting)
    told = [(line["kind"], line["step"]) for line in run(tmp_path)]
    assert told.index((CHECKPOINT, 2)) < told.index(("metrics", 3))
    assert [step for kind, step in told if kind == CHECKPOINT] == [2, 4, 6]


def test_what_was_saved_before_a_divergence_is_written_and_journaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, finished = checkpoint.Checkpoints.finish, []
    monkeypatch.setattr(checkpoint.Checkpoints, "finish", lambda self: (finish(self), finished.append(True)))
    with pytest.raises(Diverged, match="the gradient of step 4 is not finite"):
        run(tmp_path, bad_step=4)
    # By all ranks alike, before any of them leaves.
    assert finished == [True]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        "step-00000002.safetensors",
        "step-00000004.safetensors",
    ]
    assert [line["step"] for line in read(tmp_path / "journal.jsonl") if line["kind"] == CHECKPOINT] == [2, 4]


def test_a_divergence_is_said_also_where_nothing_can_be_written_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    class Full:
        """A journal for which there is no room either."""

        def event(self, kind: str, **fields: Any) -> None:
            notes.append(fields["text"])
            raise OSError(28, "No space left on device")

    notes: list[str] = []
    monkeypatch.setattr(checkpoint, "atomic_write", broken)
    # It is heard of at the end only.
    monkeypatch.setattr(checkpoint.Checkpoints, "written", lambda self: iter(()))
    handler = Notes(Full())
    logging.getLogger("pipeline").addHandler(handler)
    try:
        with pytest.raises(Diverged, match="the gradient of step 2 is not finite"):
            run(tmp_path, bad_step=2)
    finally:
        logging.getLogger("pipeline").removeHandler(handler)
    assert len(notes) == 1
    assert notes[0].startswith("a checkpoint from before the divergence was not written: ")


def test_a_checkpoint_that_the_journal_does_not_know_is_announced_when_it_is_restored(tmp_path: Path) -> None:
    run(tmp_path)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if '"checkpoint"' in line)
    # As a kill between the two leaves it.
    journal.write_text("".join(lines[:last]))
    for _ in range(2):
        assert [line["step"] for line in run(tmp_path) if line["kind"] == CHECKPOINT] == [2, 4, 6]


def figures(folder: Path) -> dict[int, set[str]]:
    """The names of the figures of every step, each written once."""
    found: dict[int, list[str]] = {}
    for line in read(folder / "journal.jsonl"):
        if line["kind"] == "metrics":
            found.setdefault(line["step"], []).extend(line["values"])
    assert all(len(names) == len(set(names)) for names in found.values())
    return {step: set(names) for step, names in found.items()}


def test_a_validation_that_a_stop_cuts_short_stays_due(tmp_path: Path) -> None:
    at, steps = loop.Position(), replace(STEPS, per_epoch=3)
    with made(tmp_path) as those:
        those.checkpoints.restore(those.state)
        assert loop.go_on(steps, replace(those, validate=lambda: None), at) == (3, False)
        assert at.due
        # Those who were to leave are in another group now, where nobody is asked to stop.
        assert loop.go_on(steps, those, at) == (6, True)
    assert [step for step, names in figures(tmp_path).items() if "validation/accuracy" in names] == [3, 6]


class Lost(Exception):
    """What a collective raises."""


def test_what_was_due_after_a_step_is_done_when_the_training_goes_on_from_there(tmp_path: Path) -> None:
    """A rank is lost while the others gather what their machines are busy with: nothing of that step is in the journal yet."""

    def lost(own_seconds: float) -> dict[str, float]:
        raise Lost

    at = loop.Position()
    with made(tmp_path, most=0.001) as those:
        those.checkpoints.restore(those.state)
        with pytest.raises(Lost):
            loop.go_on(STEPS, replace(those, monitor=lost), at)
        assert (at.step, at.due) == (1, True)
        # Of another group: it has clipped nothing yet.
        clipping = Clipping(those.state, OnlyRank(), 0.001)
        assert loop.go_on(STEPS, replace(those, clipping=clipping), at) == (6, True)
    names = figures(tmp_path)
    assert [*names] == [1, 2, 3, 4, 5, 6]
    assert all({"train/loss", "train/gradient_norm", "train/learning_rate"} <= one for one in names.values())
    # Nobody knows how long the first one took.
    assert [step for step, one in names.items() if "train/images_per_second" in one] == [2, 3, 4, 5, 6]


def test_what_is_to_be_saved_at_once_is_saved_after_any_step(tmp_path: Path) -> None:
    at = loop.Position()
    with made(tmp_path) as those:
        those.checkpoints.restore(those.state)
        loop.go_on(replace(STEPS, until=3), those, at)
        those.checkpoints.forget_saved()
        (tmp_path / "checkpoints" / "step-00000003.safetensors").unlink()
        at.due = at.save = True
        loop.go_on(replace(STEPS, until=3), those, at)
        assert not at.save
    assert (tmp_path / "checkpoints" / "step-00000003.safetensors").exists()


def test_only_steps_that_are_logged_ask_for_their_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    over_ranks = Gradients.over_ranks
    monkeypatch.setattr(Gradients, "over_ranks", lambda self: (asked.append(self.done), over_ranks(self))[1])
    with made(tmp_path) as those:
        loop.run(replace(STEPS, per_log=4), those)
    assert asked == [4, 6]
