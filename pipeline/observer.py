"""What a stage makes of its ranks while they run: how they fare, for people, and whether those that fail are started again."""

from dataclasses import replace

from pipeline.console import Progress
from pipeline.job import Job
from pipeline.launch import outcome
from pipeline.launch.failures import FINAL_EXITS, Failure
from pipeline.launch.node import Membership
from pipeline.launch.restarts import RestartPolicy
from pipeline.runs import checkpoints
from pipeline.runs.copy_process import CopyProcess
from pipeline.timeouts import RETURN_SECONDS
from pipeline.tracking import journal as journals

# The agent has no ranks for so long: it waits in the rendezvous for one that has stopped, or that is lost.
IDLE_SECONDS, WAITING_SECONDS = 3, 10


class StageObserver:
    """Shows the user how the ranks fare, and decides on restarts."""

    def __init__(self, job: Job, members: Membership, progress: Progress, copier: CopyProcess, one_by_one: bool):
        # Whether a lost rank is started again beside the others.
        self._one_by_one = one_by_one
        self._job, self._members, self._progress, self._copier = job, members, progress, copier
        self._waiting, self._lost, self._patience = False, False, RestartPolicy(job.config.dist.world_size if one_by_one else 1)

    def failed(self, failure: Failure) -> str | None:
        """Print what failed and what is done about it; returns why the ranks are not to be started again, or None."""
        self._lost = True
        if failure.exit_code in FINAL_EXITS:
            return None
        judged = failure
        if self._one_by_one and not failure.deterministic:
            # The others get on, whatever step this one was in.
            judged = replace(failure, step=max(failure.step, journals.reached(self._job.journal, evaluated=False)))
        # Another machine judges its own: the others go on without it.
        spent = None if self._one_by_one and failure.host else self._patience.reason_to_stop(judged)
        if not spent:
            anew = f"starting again from {checkpoints.newest(self._job.run) or 'the beginning'}"
            # Ranks are numbered anew in every group: the log tells which process it was.
            logs = f" (log{f' on {failure.host}' if failure.host else ''}: {failure.log})" if failure.log else ""
            what = f"it is started again, and whoever is left goes on{logs}" if self._one_by_one else anew
            self._progress.say(f"{outcome.describe(failure, self._job.config)}; {what}")
        return spent

    def say(self, text: str) -> None:
        """Print a line for the user."""
        self._progress.say(text)

    def poll(self) -> list[Failure]:
        """Show progress; returns the failures that other machines have reported."""
        self._progress.tick()
        self._copier.look(self._progress.say)
        return self._members.failures_since_last_call()

    def stop_requested(self) -> bool:
        """Return True if a worker was told to stop."""
        return self._members.leaving

    def is_done(self, idle_seconds: float) -> bool:
        """Return True if rank 0 has journalled the end and the agent only waits for other agents."""
        if idle_seconds < IDLE_SECONDS:
            self._waiting = False
            return False
        if journals.last(self._job.journal, "started", "finished", "stopped").get("kind") != "started":
            return True
        if not self._waiting and idle_seconds > WAITING_SECONDS:
            whom = "a lost worker to come back" if self._lost else "the workers' ranks"
            self._progress.say(f"waiting for {whom}, for {RETURN_SECONDS} s at most")
            self._waiting = True
        return False
