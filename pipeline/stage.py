"""Run a stage's ranks: journal and mirror open, ranks started, results published, the outcome recorded."""

import os
import shlex
import signal
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

from pipeline.config import Config, PeerError
from pipeline.console import Progress
from pipeline.data.store import Manifest
from pipeline.files import Paths
from pipeline.hardware import machine
from pipeline.hardware.sharing import gpus_taken
from pipeline.job import Job
from pipeline.launch import outcome, supervisor
from pipeline.launch.node import Membership, Node
from pipeline.observer import StageObserver
from pipeline.process_tree import STORE, TYPED_COMMAND, dvc_above
from pipeline.runs import checkpoints, status
from pipeline.runs.copy_process import CopyProcess
from pipeline.runs.identity import flatten
from pipeline.runs.status import StopRequested
from pipeline.stop_signals import StopRequest, handled_by
from pipeline.tracking import journal as journals
from pipeline.tracking.journal import Journal
from pipeline.tracking.mirror_process import MirrorProcess, address
from pipeline.tracking.mirror_state import repeat_if_cut

# How often to look whether GPUs are free.
GPU_SECONDS = 0.5
Publish = Callable[[Journal, Callable[[], str | None]], str]


class RankStage:
    """A stage with ranks: open journal and mirror, start the ranks, publish, record the outcome.

    What is not tracked has no run in MLflow, and nobody is told how to go on.
    """

    def __init__(
        self, stage: Literal["train", "evaluate"], job: Job, paths: Paths, lock: int, tracked: bool = True, command: str | None = None
    ):
        self._stage: Literal["train", "evaluate"] = stage
        self._job, self._paths, self._lock, self._tracked = job, paths, lock, tracked
        self.command = (command or command_of(stage, paths)) if tracked else ""
        self.stop_requested = False

    def run(self, module: str, header: dict[str, Any], tags: dict[str, Any], progress: Progress, publish: Publish) -> int:
        """Run the ranks to their end and return the exit code; `publish`, which may ask for MLflow's run id, returns a line about it."""
        stop = StopRequest()
        with handled_by(stop.on_signal) as before:
            code = 0
            try:
                code = self._code(module, header, tags, (progress, stop), publish)
            finally:
                self.stop_requested = stop.signal is not None or stop.hurried.is_set()
                at_until = self._job.until is not None and journals.reached(self._job.journal, evaluated=False) == self._job.until
                if stop.signal is not None or (code == status.STOPPED and not at_until):
                    # What an engine repeats is not to end this process with another code.
                    before.update(dict.fromkeys(before, signal.SIG_IGN))
        return code

    def _code(
        self, module: str, header: dict[str, Any], tags: dict[str, Any], around: tuple[Progress, StopRequest], publish: Publish
    ) -> int:
        with ExitStack() as taken:
            try:
                members = self._membership(*around, taken)
            except StopRequested as request:
                return self._stopped_before_start(str(request), around[0])
            try:
                return self._run(module, members, self._opened(header, tags), around, publish)
            finally:
                members.end_job(PeerError.exit_code)

    def _membership(self, progress: Progress, stop: StopRequest, taken: ExitStack) -> Membership:
        """Return the machines of the job, ready to begin; what it takes of this one is given back with `taken`."""
        said: list[str] = []

        def wait(why: str) -> None:
            if stop.signal is not None:
                raise StopRequested("stopped on request while it waited for GPUs")
            if not said:
                progress.say(why)
            said.append(why)
            time.sleep(GPU_SECONDS)

        # Of several machines each has an engine, or a person, who deals out its GPUs.
        gpus = taken.enter_context(gpus_taken(self._job, wait)) if self._job.config.dist.nodes == 1 else None
        if STORE not in os.environ:
            return Membership(Node.alone(self._job, gpus))
        from pipeline.cluster.leader import lead_job

        members = lead_job(self._stage, self._job, progress.say, lambda: stop.signal is not None)
        members.node = replace(members.node, gpus=gpus)
        return members

    def _stopped_before_start(self, cause: str, progress: Progress) -> int:
        run = self._job.run
        step = journals.reached(self._job.journal, self._stage == "evaluate")
        end = status.Outcome("stopped", status.STOPPED, cause, None, step, checkpoints.newest(run), self.command, stage=self._stage)
        end.write(run)
        progress.say(self._message(end))
        return status.STOPPED

    def _message(self, end: status.Outcome) -> str:
        has_saved = True
        # A journal that cannot be read says nothing of checkpoints, and must not be in the way of the ending.
        with suppress(*outcome.EXPECTED):
            has_saved = bool(journals.last(self._job.journal, journals.CHECKPOINT))
        return status.message(end, has_saved)

    def _opened(self, header: dict[str, Any], tags: dict[str, Any]) -> Journal:
        """Open the journal, and write the lines that begin a run and this start of it."""
        journal = Journal(self._job.journal)
        repeat_if_cut(self._job.run)
        if not journals.last(self._job.journal, "run"):
            journal.event("run", **({"id": uuid.uuid4().hex} | header))
        named = {name: str(value) for name, value in tags.items() if value is not None}
        journal.event("started", stage=self._stage, tags=named)
        # Before MLflow hears of it: a run that a power cut takes from the journal would stand there for ever.
        journal.sync()
        return journal

    def _run(self, module: str, members: Membership, journal: Journal, around: tuple[Progress, StopRequest], publish: Publish) -> int:
        job, run, (progress, stop) = self._job, self._job.run, around
        step = journals.reached(job.journal, self._stage == "evaluate")
        mirror = MirrorProcess(run, self._paths) if self._tracked else None
        copier = CopyProcess(run, self._tracked)
        status.running(run, step, self.command, self._stage)
        started_at = time.monotonic()
        try:
            with progress:
                observer = StageObserver(job, members, progress, copier, module.startswith("pipeline.elastic."))
                result = supervisor.run(module, job, members.node, self._lock, observer, stop)
            end = outcome.judge(result, job, checkpoints.newest(run), self.command)
        except outcome.EXPECTED as error:
            end = outcome.broken(error, step, checkpoints.newest(run), self.command)
        # Also where there was none: from here on there is only MLflow to wait for.
        stop.agent_ended()
        end = replace(end, stage=self._stage)
        message = self._message(end) if self._tracked or end.outcome not in ("done", "stopped") else ""
        try:
            journal.event("attempt-ended", stage=self._stage, elapsed_seconds=time.monotonic() - started_at)
            if end.exit_code == 0:
                message = publish(journal, lambda: mirror.run_id(stop.hurried) if mirror else None)
            journal.event("ended", stage=self._stage, outcome=end.outcome, cause=end.cause)
        except outcome.EXPECTED as error:
            # If the journal is full too, the mirror reads the ending in status.json.
            end = outcome.unpublished(end, error, self.command)
            message = self._message(end)
        journal.close()
        end.write(run)
        # Workers do not wait for what MLflow has yet to take.
        members.end_job(end.exit_code or 0)
        copier.close()
        if message:
            progress.say(message)
        if mirror:
            self._send_rest(mirror, copier, progress.say, stop, end.outcome == "stopped")
        assert end.exit_code is not None
        return end.exit_code

    def _send_rest(self, mirror: MirrorProcess, copier: CopyProcess, say: Callable[[str], None], stop: StopRequest, stopped: bool) -> None:
        """Let MLflow and the copy have the rest, for as long as they take it and nobody asks again to stop."""
        sync = f"python -m pipeline sync --params {shlex.quote(str(self._paths.params))}"
        error = mirror.finish(stop.hurried, lambda text: say(f"{text}; Ctrl-C leaves the rest to: {sync}"), stopped)
        if error is None:
            say(f"MLflow: {address(self._job.run, self._paths, with_model=self._stage == 'evaluate')}")
        else:
            say(f"MLflow does not have all of it yet ({error}). To catch up: {sync}")
        if lacks := copier.finish(stop.hurried, stopped):
            say(f"the copy does not have all of it yet ({lacks}). To send the rest: {sync}")


def command_of(stage: str, paths: Paths) -> str:
    """What a person types to go on."""
    if (typed := os.environ.get(TYPED_COMMAND)) and "\n" not in typed:
        return typed
    return "dvc repro" if dvc_above() else f"python -m pipeline {stage} --params {shlex.quote(str(paths.params))}"


@contextmanager
def errors_in_status(job: Job, stage: str, paths: Paths) -> Generator[None]:
    """Write an error before the ranks start into status.json too: DVC swallows exit codes."""
    try:
        yield
    except outcome.EXPECTED as error:
        step, checkpoint = 0, None
        # Either may be what is damaged.
        with suppress(*outcome.EXPECTED):
            step = journals.reached(job.journal, stage == "evaluate")
        with suppress(*outcome.EXPECTED):
            checkpoint = checkpoints.newest(job.run)
        with suppress(OSError):
            replace(outcome.broken(error, step, checkpoint, command_of(stage, paths)), stage=stage).write(job.run)
        raise


def run_header(config: Config, name: str, data: Manifest) -> dict[str, Any]:
    """The first line of a journal: all that MLflow needs to create its run."""
    return {
        "experiment": config.tracking.experiment,
        "name": name,
        "params": flatten(config.model_dump(exclude={"model": {"source"}})),
        "tags": {"mlflow.source.name": "pipeline", "mlflow.user": machine.user()},
        "dataset": {"name": data.name, "digest": data.digest, "counts": data.counts},
    }
