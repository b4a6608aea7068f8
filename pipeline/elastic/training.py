"""A training that goes on from group to group: what a lost rank has interrupted is done again by those who are there."""

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack

from torch import Tensor, nn

from pipeline import parallel
from pipeline.config import PeerError
from pipeline.elastic.door import Door, LostPeer
from pipeline.elastic.generations import MOST_IN_VAIN, Generation, Member
from pipeline.elastic.handover import Handover
from pipeline.files import locked
from pipeline.heartbeat import FINISHING
from pipeline.launch.failures import CONSEQUENCE
from pipeline.parallel import Strategy
from pipeline.parallel.lanes import Lanes, Replicated, Totals
from pipeline.ranks import Ranks, shutdown_group
from pipeline.timeouts import alarm_seconds
from pipeline.tracking.journal import RANKS, Journal, Notes, Silent, Writer
from pipeline.training import loop, schedule
from pipeline.training.clipping import Clipping
from pipeline.training.export import export
from pipeline.training.loop import Position
from pipeline.training.monitor import Monitor
from pipeline.training.state import State
from pipeline.training.stopping import Stop
from pipeline.training.train_rank import plan
from pipeline.training.work import Work

log = logging.getLogger(__name__)
NOTHING, REGROUP, STOP = range(3)
# How often to look for a newer generation.
LOOK_SECONDS = 0.2


class Regroup(Exception):
    """All ranks have agreed, between two steps, to enter a newer generation."""


class Agreed(Stop):
    """What ranks agree on between two steps: to stop, or to enter a newer generation."""

    def __init__(self, ranks: Ranks, alarm_seconds: int, is_outdated: Callable[[], bool]):
        super().__init__(ranks, alarm_seconds)
        self._is_outdated, self._looked_at = is_outdated, -LOOK_SECONDS
        self._wait: Callable[[], int] | None = None

    @property
    def asked(self) -> bool:
        """True once a signal has asked this rank to stop."""
        return self._asked

    def agreed(self) -> bool:
        """Return True if all ranks stop here; raises Regroup, on all ranks, if they do not stop and a newer generation is announced."""
        answer = self._wait() if self._wait else NOTHING
        if answer == REGROUP:
            raise Regroup
        outdated = self._ranks.on_rank_zero(self._look, False)
        self._wait = self._ranks.start_maximum(STOP if self._asked else REGROUP if outdated else NOTHING)
        return answer == STOP

    def _look(self) -> bool:
        """Return whether a newer generation is announced; not at every step, as that takes a moment."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now
        # Without the agent there is no newer one, and this rank is about to be told to stop.
        with contextlib.suppress(PeerError):
            return self._is_outdated()
        return False

    def forget(self) -> None:
        """Drop the question of a group that is no more."""
        self._wait = None

    def close(self) -> None:
        """Wait for the last question."""
        if self._wait:
            self._wait()
        self._wait = None
        super().close()


class Redoable(Replicated):
    """A strategy whose last step can be undone, as long as the weights are those from before it: it changes nothing but buffers."""

    def __init__(self, strategy: Strategy, model: nn.Module):
        super().__init__(model)
        self._strategy, self._buffers, self.reads = strategy, list(model.buffers()), strategy.reads
        self._before: list[Tensor] = []
        self.step = -1

    def backward(self, step: int) -> Totals:
        """Gradients and totals of a step."""
        self.step, self._before = step, [one.clone() for one in self._buffers]
        return self._strategy.backward(step)

    def undo(self) -> None:
        """Put the buffers back to what they were before the last step."""
        for one, value in zip(self._buffers, self._before, strict=True):
            one.copy_(value)


class ElasticTraining:
    """One rank's training, through any number of generations."""

    def __init__(self, work: Work, member: Member, door: Door, executor: Executor, leaving: ExitStack):
        config = work.job.config
        self._work, self._member, self._door, self._leaving = work, member, door, leaving
        self._group, self._steps = door.outside, plan(work.job, work.order)
        optimizer = schedule.optimizer(config.train, list(work.model.parameters()))
        self._state = State(work.model, optimizer, ema_decay=config.train.ema_decay)
        self._guard = work.guard(self._state, self._group, lambda: self._lanes)
        self._checkpoints = work.checkpoints(self._group, executor)
        self._checkpoints.awaits_best = True
        self._agreed = Agreed(self._group, alarm_seconds(config.dist.grace_seconds), member.is_outdated)
        self._handover = Handover(self._state, self._guard, self._checkpoints, self._group)
        self._journal: Writer = Silent()
        # Whether this rank has taken over journal and checkpoints; at which step it came into its group.
        self._writes, self._entered_at, self._in_vain = False, 0, 0
        self._lanes = Lanes(config.dist.pieces_per_rank, 0, config.dist.images_per_step)
        self._strategy: Redoable | None = None

    def run(self) -> None:
        """Train until it is over, or until this rank is asked to stop and has nothing that is worth saving."""
        while (generation := self._member.next(lambda: self._agreed.asked and self._handover.at is None)) is not None:
            try:
                self._enter(generation)
                self._end(*loop.go_on(self._steps, self._parts(), self._position))
                return
            except Regroup:
                log.info("generation %d is over", generation.number)
            except RuntimeError as error:
                self._in_vain += 1
                if not is_loss(error) or self._in_vain > MOST_IN_VAIN:
                    raise
                log.info("generation %d has lost a rank: %s", generation.number, str(error).splitlines()[0])
                self._member.failed()
            self._leave()

    @property
    def _position(self) -> Position:
        assert self._handover.at is not None
        return self._handover.at

    def _enter(self, generation: Generation) -> None:
        """Form the group, and come to the step that is next."""
        self._door.enter(generation)
        self._group.on_rank_zero(self._open_journal, None)
        at = self._handover.meet(self._writes)
        self._writes, self._entered_at = self._group.on_rank_zero(lambda: True, False), at.step
        log.info("generation %d: rank %d of %d goes on at step %d", generation.number, self._group.rank, self._group.size, at.step)
        self._journal.event(RANKS, step=at.step, ranks=self._group.size, generation=generation.number)
        self._journal.metrics({"system/ranks": float(self._group.size)}, at.step)

    def _open_journal(self) -> None:
        """Open the journal, which rank 0 of earlier generations has left, if it was another."""
        if not isinstance(self._journal, Journal):
            job = self._work.job
            self._leaving.enter_context(locked(job.writing))
            self._journal = Journal(job.journal)
            logging.getLogger("pipeline").addHandler(Notes(self._journal))

    def _parts(self) -> loop.Parts:
        """Share the lanes out, and put together what the loop is made of."""
        work, group, config = self._work, self._group, self._work.job.config
        # The batch stays, however many ranks there are.
        whole = {"global_batch": config.dist.images_per_step, "batch_size_per_gpu": None, "accumulation": 1}
        dist = config.dist.model_copy(update=whole | {"world_size": group.size, "nodes": 1})
        self._lanes = Lanes(dist.pieces_per_rank, group.rank, dist.images_per_step)
        strategy = Redoable(parallel.build(work.task, self._lanes, group, dist), work.model)
        self._strategy, work.reader.own = strategy, strategy.reads
        evaluation, dtype = work.evaluation(group), schedule.autocast_dtype(work.job.precision)
        return loop.Parts(
            strategy=strategy,
            state=self._state,
            guard=self._guard,
            clipping=Clipping(self._state, group, config.train.clip_norm),
            schedule=schedule.build(config, self._steps.per_epoch),
            checkpoints=self._checkpoints,
            journal=self._journal,
            stop=self._agreed,
            validate=lambda: evaluation(work.model, dtype, self._agreed.agreed),
            heartbeat=group.heartbeat,
            monitor=Monitor(group, 1),
        )

    def _end(self, step: int, finished: bool) -> None:
        self._agreed.close()
        if finished:
            digest, job = self._state.weights_sha256(), self._work.job
            self._group.while_others_wait(lambda: export(job), FINISHING)
            self._journal.event("finished", step=step, weights_sha256=digest)
        else:
            self._journal.event("stopped", step=step)
        with contextlib.suppress(PeerError):
            self._group.on_rank_zero(self._member.done, None)
        shutdown_group(self._group)

    def _leave(self) -> None:
        """Leave the group, and undo what was done of a step."""
        at, strategy, self._strategy = self._handover.at, self._strategy, None
        if at is not None and strategy is not None and strategy.step == at.step:
            strategy.undo()
        if at is not None and at.step > self._entered_at:
            self._in_vain = 0
        self._agreed.forget()
        groups = self._door.leave()
        # DDP would take part in the backward passes of the next one.
        del strategy
        gc.collect()
        # The end of a group waits for what gloo has under way, which may be for ever.
        threading.Thread(target=groups.clear, daemon=True).start()


def is_loss(error: RuntimeError) -> bool:
    """Return whether a collective has failed, as a rank is lost; what has an exit code of its own is no such thing."""
    return isinstance(error, LostPeer) or (not hasattr(error, "exit_code") and bool(CONSEQUENCE.search(str(error))))
