"""How a run ended: judged from the journal and from torchrun, written down for programs, said once for people."""

import shutil
import signal
from dataclasses import replace

from pipeline.config import Config, MachineError, PeerError
from pipeline.job import Job
from pipeline.launch.failures import Failure, LaunchResult
from pipeline.launch.supervisor import FINAL_EXITS, RETURN_SECONDS
from pipeline.runs.status import INTERRUPTED, STOPPED, TERMINATED, Outcome
from pipeline.tracking import journal

LITTLE_BYTES = 1 << 20


def judge(watch: LaunchResult, job: Job, checkpoint: str | None, command: str) -> Outcome:
    """What became of the last start in this run's journal."""
    run = job.run
    end = journal.last(job.journal, "started", "finished", "stopped")
    step = journal.last(job.journal, "metrics", "finished", "stopped").get("step", 0)

    def ended(outcome: str, exit_code: int, cause: str, rank: int | None = None) -> Outcome:
        return Outcome(outcome, exit_code, cause, rank, step, checkpoint, command)

    if watch.exit_code == 0 and end["kind"] != "stopped":
        return Outcome("done", 0, "", None, step, checkpoint, "")
    if watch.stopped_at_once:
        return ended("stopped", INTERRUPTED if watch.stopped_by == signal.SIGINT else TERMINATED, "stopped at once by a second signal")
    if end["kind"] == "stopped" and watch.stopped_by is None and watch.exit_code < 0:
        return ended("stopped", STOPPED, f"torchrun was ended by {signal.Signals(-watch.exit_code).name}; its ranks saved at step {step}")
    told = [one for one in watch.failures if one.exit_code in FINAL_EXITS] if end["kind"] != "stopped" else []
    if end["kind"] == "stopped":
        return ended("stopped", STOPPED, f"stopped on request at step {step}")
    if not told and (watch.stopped_by is not None or watch.torchrun_was_stopped):
        return ended("stopped", STOPPED, f"stopped on request after step {step}, when nothing could be saved")
    silent = watch.unexplained or not watch.failures
    if silent and shutil.disk_usage(run).free < LITTLE_BYTES:
        return ended("machine", MachineError.exit_code, f"{run}: the disk is full, and torchrun died of it; make room")
    if silent:
        return ended("failed", PeerError.exit_code, f"torchrun ended with {watch.exit_code} and no word from a rank; see {run / 'logs'}")
    failure = watch.root_cause()
    step = max(step, failure.step)
    if failure.out_of_memory:
        return ended("machine", MachineError.exit_code, describe(failure, job.config), failure.rank)
    if failure.exit_code > 1:
        name = {2: "configuration", 3: "data", 4: "machine", 5: "diverged"}.get(failure.exit_code, "failed")
        # On a full disk even last words may be lost.
        cause = failure.cause or f"{run}: a rank could not go on nor say why; see that there is room and a right to write"
        end = ended(name, failure.exit_code if failure.exit_code in (2, 3, 4, 5) else PeerError.exit_code, cause, failure.rank)
        # The same settings would diverge again.
        return replace(end, command="") if name == "diverged" else end
    why = watch.given_up or "torchrun gave up"
    if watch.nobody_came_back:
        why = f"the lost machine did not come back in {RETURN_SECONDS} s"
    return ended("failed", PeerError.exit_code, f"{describe(failure, job.config)}; {why}; logs: {run / 'logs'}", failure.rank)


def broken(error: OSError, step: int, checkpoint: str | None, command: str) -> Outcome:
    """The launcher itself could not go on, as on a full disk."""
    return Outcome("machine", MachineError.exit_code, _words(error), None, step, checkpoint, command)


def _words(error: OSError) -> str:
    return f"{error.filename or 'starting the ranks'}: {error.strerror or error}; see that there is room and a right to write"


def unpublished(end: Outcome, error: OSError | MachineError, command: str) -> Outcome:
    """The ranks were done, and what they left could not be put in place; what ended otherwise stays as it ended."""
    if end.exit_code != 0:
        return end
    cause = _words(error) if isinstance(error, OSError) else str(error)
    return replace(end, outcome="machine", exit_code=MachineError.exit_code, cause=cause, command=command)


def describe(failure: Failure, config: Config) -> str:
    """One failure in a few words."""
    who = ("a rank" if failure.rank is None else f"rank {failure.rank}") + (f" on {failure.host}" if failure.host else "")
    when = f" in step {failure.step}" if failure.step >= 0 else " before its first step"
    if failure.out_of_memory:
        size = f"lower dist.batch_size_per_gpu ({config.dist.batch_size_per_gpu}) or raise dist.accumulation ({config.dist.accumulation})"
        return f"{who} ran out of memory{when}; {size} and dist.lanes ({config.dist.lanes}), or give it more memory"
    if failure.is_consequence:
        return f"{who} lost its connection to another rank{when}"
    if failure.exit_code == 0:
        return f"{who} was lost{when}"
    if failure.signal:
        return f"{who} was ended by {failure.signal}{when}"
    return f"{who} failed{when}: {failure.cause or f'exit code {failure.exit_code}'}"
