"""The loop and the checkpoints that are written beside it."""

import logging
import math
from concurrent.futures import ThreadPoolExecutor
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


def run(folder: Path, bad_step: int = -1) -> list[dict[str, Any]]:
    """Train; returns the journal."""
    state = State(*parts())
    strategy, journal = Breaking(state.model, bad_step), Journal(folder / "journal.jsonl")
    with ThreadPoolExecutor(1) as executor:
        try:
            loop.run(
                STEPS,
                loop.Parts(
                    strategy=strategy,
                    state=state,
                    guard=NonFiniteGuard(state, OnlyRank(), lambda step: ""),
                    clipping=Clipping(state, OnlyRank(), None),
                    schedule=Schedule("constant", 0.1, 0, STEPS.total),
                    checkpoints=Checkpoints(folder / "checkpoints", 9, OnlyRank(), folder / "journal.jsonl", executor),
                    journal=journal,
                    stop=Stop(None),
                    validate=lambda: Result(0.5, 5, 10, 10, torch.zeros(2, 2)),
                ),
            )
        finally:
            journal.close()
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
