"""What a rank that comes later, or is a step behind, gets from one that is farthest: the weights and all else that the next step needs."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from pipeline.ranks import Ranks
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.checkpoint_file import TYPES
from pipeline.training.guard import NonFiniteGuard
from pipeline.training.loop import Position
from pipeline.training.state import State


class Handover:
    """Brings all ranks of a new group to the same step."""

    def __init__(self, state: State, guard: NonFiniteGuard, checkpoints: Checkpoints, ranks: Ranks):
        self._state, self._guard, self._checkpoints, self._ranks = state, guard, checkpoints, ranks
        # Where this rank is; None while it has no weights of a step.
        self.at: Position | None = None
        # Whether nobody had weights, when ranks last met.
        self.anew = False

    def meet(self, writes: bool) -> Position:
        """Return where all ranks go on: where the farthest is, else at the newest checkpoint; every rank must call it.

        `writes` is true on the rank that has the journal open.
        """
        at = self.at
        own = [-1, False, False, -1] if at is None else [at.step, at.due, at.save, self._checkpoints.marks["saved"]]
        row = torch.tensor([[*own, writes]], device=self._ranks.device)
        rows = self._ranks.gather_rows(row, [1] * self._ranks.size).tolist()
        steps = [row[0] for row in rows]
        farthest = max(steps)
        self.anew = farthest < 0
        if self.anew:
            step = self._checkpoints.restore(self._state)
            self._guard.start(step)
            self.at = Position(step, self._checkpoints.validation_due)
            return self.at
        if min(steps) < farthest:
            at = self.at = self._give(steps.index(farthest), at, farthest)
        assert at is not None
        # A step behind, it has not seen what came after this one.
        foremost = [row for row in rows if row[0] == farthest]
        at.due = any(due for _, due, _, _, _ in foremost) or any(0 <= step < farthest for step in steps)
        at.save = any(save for _, _, save, _, _ in foremost)
        if len({saved for _, _, _, saved, _ in foremost}) > 1:
            self._checkpoints.forget_saved()
        if not any(has_journal for *_, has_journal in rows):
            self._checkpoints.written_by_another()
            at.due = at.save = farthest > 0
        return at

    def _give(self, source: int, at: Position | None, farthest: int) -> Position:
        """Broadcast the state of one rank; those that are there already drop it."""
        header = self._ranks.broadcast_bytes(self._ranks.on_rank(source, lambda: self._header(at), b""), source)
        facts: dict[str, Any] = json.loads(header)
        # All of them, before the own ones are touched: the one that gives may be lost meanwhile.
        behind = at is None or at.step < farthest
        tensors = [one for one in self._tensors(source, facts["layouts"]) if behind]
        if at is not None and not behind:
            return at
        self._state.load(tensors)
        self._guard.take(facts["guard"])
        self._checkpoints.take(facts["checkpoints"])
        return Position(**facts["position"])

    def _header(self, at: Position | None) -> bytes:
        assert at is not None
        layouts = {name: (TYPES[value.dtype], list(value.shape)) for name, value in self._state.whole()}
        facts = {"position": asdict(at), "layouts": layouts, "guard": self._guard.marks, "checkpoints": self._checkpoints.marks}
        return json.dumps(facts).encode()

    def _tensors(self, source: int, layouts: dict[str, tuple[str, list[int]]]) -> Iterator[tuple[str, Tensor]]:
        types = {name: kind for kind, name in TYPES.items()}
        own = self._ranks.on_rank(source, lambda: dict(self._state.whole()), {})
        for name, (kind, shape) in layouts.items():
            value = torch.empty(shape, dtype=types[kind])
            value = self._ranks.on_rank(source, lambda name=name: own[name].detach().cpu().contiguous(), value)
            self._ranks.heartbeat.waiting()
            self._ranks.broadcast(value, source)
            yield name, value
