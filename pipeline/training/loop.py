"""The loop: on one screen, knowing nothing of ranks."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.heartbeat import Heartbeat
from pipeline.parallel import Strategy
from pipeline.tracking.journal import CHECKPOINT, Writer
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.clipping import Clipping
from pipeline.training.evaluation import Result
from pipeline.training.guard import Diverged, NonFiniteGuard, finite
from pipeline.training.schedule import Schedule
from pipeline.training.state import State

log = logging.getLogger(__name__)


class Stopping(Protocol):
    """Decides, on all ranks alike, whether to stop."""

    def agreed(self) -> bool: ...


@dataclass(frozen=True)
class Steps:
    """At which steps to log, validate and save: a function of the experiment, never of the clock."""

    total: int
    per_epoch: int
    per_log: int
    per_checkpoint: int
    global_batch: int
    # Where to stop, if not at the end.
    until: int | None = None

    def logs(self, step: int) -> bool:
        """Return whether a step is logged."""
        return step % self.per_log == 0 or step % self.per_epoch == 0


@dataclass(frozen=True)
class Parts:
    """What the loop is made of."""

    strategy: Strategy
    state: State
    guard: NonFiniteGuard
    clipping: Clipping
    schedule: Schedule
    checkpoints: Checkpoints
    journal: Writer
    stop: Stopping
    # None if the ranks were asked to stop.
    validate: Callable[[], Result | None]
    # What machines are busy with; every rank calls it.
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None))
    monitor: Callable[[float], dict[str, float]] = lambda _: {}


@dataclass
class Position:
    """How many updates the weights have had, and whether the last one is still to be logged, validated and saved."""

    step: int = 0
    due: bool = False
    # It is to be saved, whichever step it is.
    save: bool = False
    # Of the last step, if it is logged.
    figures: dict[str, float] = field(default_factory=dict[str, float])


def run(steps: Steps, parts: Parts) -> tuple[int, bool]:
    """Train from the newest checkpoint to the last step, or to where it is to stop; returns the step reached, and True if all is done."""
    step = parts.checkpoints.restore(parts.state)
    parts.guard.start(step)
    return go_on(steps, parts, Position(step, parts.checkpoints.validation_due))


def go_on(steps: Steps, parts: Parts, at: Position) -> tuple[int, bool]:
    """The same from any position, which moves on with every update."""
    try:
        return _go_on(steps, parts, at)
    except Diverged:
        # All ranks come here, and end each other by leaving.
        try:
            finish_checkpoints(parts)
        except OSError as error:
            log.warning("a checkpoint from before the divergence was not written: %s", error)
        raise


def _go_on(steps: Steps, parts: Parts, at: Position) -> tuple[int, bool]:
    speed = Speed(steps.global_batch, at.step, parts.heartbeat)
    going_on = not at.due or recorded(steps, parts, at, speed)
    at.due = not going_on
    while going_on and at.step < (steps.until or steps.total) and not parts.stop.agreed():
        at.figures = update(steps, parts, at.step)
        at.step, at.due = at.step + 1, True
        going_on = recorded(steps, parts, at, speed)
        at.due = not going_on
        announce_checkpoints(parts)
    save_checkpoint(parts, at.step, validation_due=not going_on)
    finish_checkpoints(parts)
    return at.step, going_on and at.step == steps.total


def update(steps: Steps, parts: Parts, step: int) -> dict[str, float]:
    """Make one step; returns its figures, if it is logged. Whatever ranks have to say to each other is said before the weights change."""
    parts.schedule.apply(parts.state.optimizer, step)
    totals = parts.strategy.backward(step)
    means = totals.over_ranks() if steps.logs(step + 1) else {}
    parts.guard.observe()
    parts.clipping()
    parts.state.optimizer.step()
    parts.state.average.update(step)
    return means | parts.clipping.figures() if means else {}


def recorded(steps: Steps, parts: Parts, at: Position, speed: "Speed") -> bool:
    """Log, validate and save, as is due after this step; returns False if all ranks were asked to stop meanwhile."""
    step, going_on = at.step, True
    if at.figures:
        parts.guard.raise_if_diverged()
        means = finite(at.figures, step)
        rate = {"train/learning_rate": parts.schedule.rate(step - 1), "train/samples": float(step * steps.global_batch)}
        parts.journal.metrics(means | rate | speed.since_last(step) | parts.monitor(speed.own_seconds), step)
    if step % steps.per_epoch == 0:
        going_on = validated(step, parts)
        speed.restart(step)
    if going_on and (at.save or step % steps.per_checkpoint == 0):
        save_checkpoint(parts, step)
        at.save = False
    return going_on


def validated(step: int, parts: Parts) -> bool:
    """Validate, and keep the model if it is the best; returns False if all ranks were asked to stop meanwhile."""
    parts.guard.check(step)
    with parts.state.average.in_place():
        result = parts.validate()
        if result is None:
            return False
        accuracies = {"validation/accuracy": result.accuracy, "validation/top5_accuracy": result.top5_accuracy}
        parts.journal.metrics(finite({"validation/loss": result.loss} | accuracies, step), step)
        parts.checkpoints.save_best(parts.state, step, result.accuracy)
    return True


def save_checkpoint(parts: Parts, step: int, validation_due: bool = False) -> None:
    """Begin to save, if all ranks hold finite weights."""
    parts.guard.check(step)
    parts.checkpoints.save(step, parts.state, validation_due)


def announce_checkpoints(parts: Parts) -> None:
    """Journal what has been written: in this order, as a kill between the two must not announce a missing file."""
    for step in parts.checkpoints.written():
        parts.journal.event(CHECKPOINT, step=step)


def finish_checkpoints(parts: Parts) -> None:
    """Wait until all is written and journaled."""
    try:
        parts.checkpoints.finish()
    finally:
        announce_checkpoints(parts)


class Speed:
    """Images per second between two log lines, and the seconds that this rank did not wait for others, a step."""

    def __init__(self, global_batch: int, step: int, heartbeat: Heartbeat):
        self._global_batch, self._heartbeat, self.own_seconds = global_batch, heartbeat, 0.0
        self.restart(step)

    def restart(self, step: int) -> None:
        """Count from here."""
        self._step, self._started_at, self._waited_seconds = step, time.monotonic(), self._heartbeat.waited_seconds

    def since_last(self, step: int) -> dict[str, float]:
        """The speed since the last line."""
        if step == self._step:
            return {}
        images, elapsed_seconds = (step - self._step) * self._global_batch, time.monotonic() - self._started_at
        self.own_seconds = (elapsed_seconds - self._heartbeat.waited_seconds + self._waited_seconds) / max(step - self._step, 1)
        self.restart(step)
        return {"train/images_per_second": images / max(elapsed_seconds, 1e-9)}
