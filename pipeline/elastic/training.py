"""A training that goes on from group to group: what a lost rank has interrupted is done again by those who are there."""

import contextlib
import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack

from torch import Tensor, nn

from pipeline import parallel
from pipeline.config import PeerError
from pipeline.elastic.agreement import Agreed, Regroup, Reshare
from pipeline.elastic.generations import MOST_IN_VAIN, Generation, Member, machine_of
from pipeline.elastic.handover import Handover
from pipeline.elastic.process_groups import LostPeer, ProcessGroups
from pipeline.elastic.speeds import Speeds
from pipeline.files import locked
from pipeline.heartbeat import FINISHING
from pipeline.launch.failures import CONSEQUENCE
from pipeline.parallel import Strategy
from pipeline.parallel.lanes import Lanes, Replicated, Totals
from pipeline.ranks import shutdown_group
from pipeline.timeouts import ENDING_SECONDS, alarm_seconds
from pipeline.tracking.journal import LANES, RANKS, Journal, Notes, Silent, Writer
from pipeline.training import loop, schedule
from pipeline.training.clipping import Clipping
from pipeline.training.export import export
from pipeline.training.loop import Position
from pipeline.training.monitor import Monitor
from pipeline.training.state import State
from pipeline.training.train_rank import plan
from pipeline.training.work import Work

log = logging.getLogger(__name__)


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

    def __init__(self, work: Work, member: Member, groups: ProcessGroups, executor: Executor, own_seconds: float):
        config = work.job.config
        self._work, self._member, self._groups, self._leaving = work, member, groups, ExitStack()
        self._group, self._steps = groups.ranks, plan(work.job, work.order)
        optimizer = schedule.optimizer(config.train, list(work.model.parameters()))
        self._state = State(work.model, optimizer, ema_decay=config.train.ema_decay)
        self._guard = work.guard(self._state, self._group, lambda: self._lanes)
        self._checkpoints = work.checkpoints(self._group, executor)
        self._checkpoints.awaits_best = True
        self._agreed = Agreed(self._group, alarm_seconds(config.dist.grace_seconds), member, groups.on_leader)
        self._handover = Handover(self._state, self._guard, self._checkpoints, self._group)
        self._journal: Writer = Silent()
        # Whether this rank has taken over journal and checkpoints; at which step it came into its group.
        self._writes, self._entered_at, self._in_vain = False, 0, 0
        self._lanes, self._speeds = Lanes(config.dist.pieces_per_rank, 0, config.dist.images_per_step), Speeds(own_seconds)
        self._strategy: Redoable | None = None
        # What clears away the last group.
        self._clearing: threading.Thread | None = None

    def run(self) -> None:
        """Train until it is over, or until this rank is asked to stop and has nothing that is worth saving."""
        try:
            self._run()
        finally:
            if self._clearing:
                self._clearing.join(ENDING_SECONDS)

    def _run(self) -> None:
        while (generation := self._member.next(self._gives_up)) is not None:
            try:
                self._enter(generation)
                while not self._trained():
                    self._drop_strategy()
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

    def _gives_up(self) -> bool:
        """Asked while this rank waits for others, perhaps long, as a spare."""
        self._group.heartbeat.outside()
        return self._agreed.gives_up(self._handover.at is not None)

    def _trained(self) -> bool:
        """Train to the end; returns False where the lanes are to be shared out anew."""
        parts = self._parts()
        with contextlib.suppress(Reshare):
            self._end(*loop.go_on(self._steps, parts, self._position))
            return True
        return False

    @property
    def _position(self) -> Position:
        assert self._handover.at is not None
        return self._handover.at

    def _enter(self, generation: Generation) -> None:
        """Form the group, and come to the step that is next."""
        self._groups.enter(generation)
        self._group.on_rank_zero(self._open_journal, None)
        self._group.on_rank_zero(self._member.formed, None)
        at = self._handover.meet(self._writes)
        self._writes, self._entered_at = self._group.on_rank_zero(lambda: True, False), at.step
        log.info("generation %d: rank %d of %d goes on at step %d", generation.number, self._group.rank, self._group.size, at.step)
        machines = Counter(machine_of(name) for name in generation.members)
        who = {"ranks": self._group.size, "generation": generation.number, "machines": dict(machines)}
        self._journal.event(RANKS, step=at.step, anew=self._handover.anew, **who)
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
        if config.dist.lanes_per_rank == "auto":
            self._lanes = self._speeds.shared_out(self._lanes, group)
            self._journal.event(LANES, per_rank=self._lanes.per_rank, step=self._position.step)
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
            validate=lambda: evaluation(work.model, dtype, self._agreed.stops),
            heartbeat=group.heartbeat,
            monitor=self._watched(Monitor(group, 1)),
        )

    def _watched(self, monitor: Monitor) -> Callable[[float], dict[str, float]]:
        """Let what is known of all ranks' steps tell whether lanes are to move."""

        def watch(own_seconds: float) -> dict[str, float]:
            figures = monitor(own_seconds)
            if self._work.job.config.dist.lanes_per_rank == "auto":
                self._agreed.reshares = self._speeds.learn(figures, self._lanes)
            return figures

        return watch

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
        at = self._handover.at
        if at is not None and self._strategy is not None and self._strategy.step == at.step:
            self._strategy.undo()
        if at is not None and at.step > self._entered_at:
            self._in_vain = 0
        self._agreed.forget()
        left = self._groups.leave()
        self._drop_strategy()
        # The end of a group waits for what gloo has under way, which may be for ever.
        self._clearing = threading.Thread(target=left.clear, daemon=True)
        self._clearing.start()

    def _drop_strategy(self) -> None:
        # DDP would take part in the backward passes of the next one.
        self._strategy = None
        gc.collect()


def is_loss(error: RuntimeError) -> bool:
    """Return whether a collective has failed, as a rank is lost; what has an exit code of its own is no such thing."""
    return isinstance(error, LostPeer) or (not hasattr(error, "exit_code") and bool(CONSEQUENCE.search(str(error))))
