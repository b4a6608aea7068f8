"""How a run ended: judged from the journal and from torchrun, written down for programs, said once for people."""

import shutil
import signal
from dataclasses import replace

from pipeline.config import Config, ConfigError, DataError, Dist, MachineError, PeerError
from pipeline.files import describe as describe_os_error
from pipeline.job import Job
from pipeline.launch.failures import FINAL_EXITS, Failure, LaunchResult
from pipeline.runs.status import INTERRUPTED, STOPPED, TERMINATED, Outcome
from pipeline.stop_signals import signal_name
from pipeline.timeouts import RETURN_SECONDS
from pipeline.tracking import journal

LITTLE_BYTES = 1 << 20
# What a command raises for a user.
EXPECTED = (ConfigError, DataError, MachineError, PeerError, OSError)
NAMES = {2: "configuration", 3: "data", 4: "machine", 5: "diverged"}


def judge(result: LaunchResult, job: Job, checkpoint: str | None, command: str) -> Outcome:
    """Return how the newest start in this run's journal ended."""
    end = journal.last(job.journal, "started", "finished", "stopped")["kind"]
    step = journal.reached(job.journal, evaluated=job.weights is not None)
    if end == "finished" or (result.exit_code == 0 and end != "stopped" and job.weights is not None):
        # Also where a signal came when rank 0 had written all. An evaluation writes no such line.
        return Outcome("done", 0, "", None, step, checkpoint, "")
    unsaved = (
        "the evaluation was stopped on request" if job.weights else f"stopped on request after step {step}, when nothing could be saved"
    )
    if end == "stopped" and step == job.until:
        return Outcome("stopped", STOPPED, f"stopped at step {step}, as asked", None, step, checkpoint, command)
    stopped = _stopped(result, end == "stopped", step, unsaved)
    if stopped is not None:
        return Outcome("stopped", *stopped, None, step, checkpoint, command)
    return _failed(result, job, Outcome("failed", PeerError.exit_code, "", None, step, checkpoint, command))


def _stopped(result: LaunchResult, saved: bool, step: int, unsaved: str) -> tuple[int, str] | None:
    """Return exit code and cause if the ranks were stopped, None if they failed."""
    if result.stopped_at_once:
        return INTERRUPTED if result.stopped_by == signal.SIGINT else TERMINATED, "stopped at once by a second signal"
    if saved and result.stopped_by is None and result.exit_code < 0:
        return STOPPED, f"torchrun was ended by {signal_name(-result.exit_code)}; its ranks saved at step {step}"
    asked = result.stopped_by is not None or result.agent_was_stopped
    if saved and (asked or not result.agent_error):
        return STOPPED, f"stopped on request at step {step}"
    final = any(one.exit_code in FINAL_EXITS and not one.waiting for one in result.failures)
    if not final and asked:
        return STOPPED, unsaved
    return None


def _failed(result: LaunchResult, job: Job, end: Outcome) -> Outcome:
    """Return the outcome of ranks that failed, for people and with its exit code."""
    silent, torchrun = result.unexplained or not result.failures, result.agent_error and f"torchrun's agent failed: {result.agent_error}"
    if silent and shutil.disk_usage(job.run).free < LITTLE_BYTES:
        cause = f"{job.run}: the disk is full, and torchrun died of it; make room"
        return replace(end, outcome="machine", exit_code=MachineError.exit_code, cause=cause)
    if silent and result.nobody_came_back:
        return replace(end, cause=f"a machine was lost before a rank began, and did not come back in {RETURN_SECONDS} s")
    if silent:
        why = torchrun or f"torchrun ended with {result.exit_code} and no word from a rank"
        return replace(end, cause=f"{why}; see {job.run / 'logs'}")
    failure = result.root_cause()
    end = replace(end, rank=failure.rank, step=max(end.step, failure.step))
    if failure.out_of_memory:
        return replace(end, outcome="machine", exit_code=MachineError.exit_code, cause=describe(failure, job.config))
    if failure.exit_code > 1:
        # On a full disk a rank cannot even write why it ends.
        cause = failure.cause or f"{job.run}: a rank could not go on nor say why; see that there is room and a right to write"
        name = NAMES.get(failure.exit_code)
        end = replace(end, outcome=name or "failed", exit_code=failure.exit_code if name else PeerError.exit_code, cause=cause)
        # The same settings would diverge again.
        return replace(end, command="") if name == "diverged" else end
    why = result.given_up or torchrun or "torchrun gave up"
    if result.nobody_came_back:
        why = f"the lost machine did not come back in {RETURN_SECONDS} s"
    return replace(end, cause=f"{describe(failure, job.config)}; {why}; logs: {failure.log or job.run / 'logs'}")


def broken(error: Exception, step: int, checkpoint: str | None, command: str) -> Outcome:
    """The launcher itself could not begin or go on, as on a full disk."""
    name, exit_code, cause = _of_error(error)
    return Outcome(name, exit_code, cause, None, step, checkpoint, command)


def _of_error(error: Exception) -> tuple[str, int, str]:
    if isinstance(error, OSError):
        return "machine", MachineError.exit_code, describe_os_error(error, "starting the ranks")
    exit_code: int = getattr(error, "exit_code", PeerError.exit_code)
    return NAMES.get(exit_code, "failed"), exit_code, str(error)


def unpublished(end: Outcome, error: Exception, command: str) -> Outcome:
    """The ranks were done, and what they left could not be put in place; what ended otherwise stays as it ended."""
    if end.exit_code != 0:
        return end
    name, exit_code, cause = _of_error(error)
    return replace(end, outcome=name, exit_code=exit_code, cause=cause, command=command)


def _smaller(dist: Dist) -> str:
    """What to change so that a rank computes fewer images at once."""
    lower = f"lower dist.{dist.batch_key} ({getattr(dist, dist.batch_key)})"
    if dist.lanes:
        return f"{lower} or raise dist.lanes ({dist.lanes})"
    # More accumulation of the same batch per GPU is a larger step alone.
    return lower if dist.batch_size_per_gpu else f"{lower} or raise dist.accumulation ({dist.accumulation})"


def describe(failure: Failure, config: Config) -> str:
    """One failure in a few words."""
    who = ("a rank" if failure.rank is None else f"rank {failure.rank}") + (f" on {failure.host}" if failure.host else "")
    when = f" in step {failure.step}" if failure.step >= 0 else " before its first step"
    if failure.out_of_memory:
        return f"{who} ran out of memory{when}; {_smaller(config.dist)}, or give it more memory"
    if failure.is_consequence:
        return f"{who} lost its connection to another rank{when}"
    if failure.exit_code == 0:
        return f"{who} was lost{when}"
    if failure.signal:
        return f"{who} was ended by {failure.signal}{when}"
    return f"{who} failed{when}: {failure.cause or f'exit code {failure.exit_code}'}"
