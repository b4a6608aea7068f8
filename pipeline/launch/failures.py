"""A failed rank: which one, in which step, why, and whether it is the root cause or the consequence of another's failure."""

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import heartbeat
from pipeline.stop_signals import signal_name

# What a rank's error says if it lost its connection to a peer.
CONSEQUENCE = re.compile(
    r"onnection (closed|reset|refused|was likely closed)|connectFullMesh|Broken pipe|Timed out waiting|wait timeout after"
    r"|unhandled system error|remote process exited|communicator was aborted|collective operation timeout"
)
OUT_OF_MEMORY = re.compile(r"out of memory|[Cc]an(no|')t allocate memory|not enough memory|MemoryError|bad_alloc|_ALLOC(ATION)?_FAILED")
CRASH_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
# A rank that hung; the same code as for one that was lost.
HUNG = 6
# Exit codes of a rank that say that starting again cannot help.
FINAL_EXITS = (2, 3, 4, 5, HUNG)


@dataclass(frozen=True)
class Failure:
    """The root cause of the end of an attempt, on one machine."""

    rank: int | None
    exit_code: int
    cause: str
    attempt: int
    # The step in which it failed; -1 before the first one.
    step: int = -1
    # The kernel killed it, as memory ran out.
    oom_killed: bool = False
    # It hangs, but only because it waits for another machine's rank.
    waiting: bool = False
    host: str | None = None
    # What it wrote to stderr, if anything.
    log: str = ""
    at: float = field(default_factory=time.monotonic)

    @property
    def signal(self) -> str | None:
        return signal_name(-self.exit_code) if self.exit_code < 0 else None

    @property
    def is_consequence(self) -> bool:
        """True if this is the consequence of another rank's failure, such as a connection reset, and no root cause."""
        # NCCL's watchdog aborts a rank that has lost a peer.
        return self.waiting or (self.signal in (None, "SIGABRT") and bool(CONSEQUENCE.search(self.cause)))

    @property
    def out_of_memory(self) -> bool:
        return self.oom_killed or bool(OUT_OF_MEMORY.search(self.cause))

    @property
    def deterministic(self) -> bool:
        """True if the same step would fail again (exception, segfault, out of memory), unlike a kill from outside."""
        return not self.is_consequence and (self.out_of_memory or self.exit_code > 0 or self.signal in CRASH_SIGNALS)


@dataclass
class LaunchResult:
    """What happened while the agent ran."""

    stopped_by: int | None = None
    stopped_at_once: bool = False
    exit_code: int = 0
    nobody_came_back: bool = False
    given_up: str | None = None
    # A signal reached the agent itself.
    agent_was_stopped: bool = False
    # The error that the agent itself ended with, which asks its ranks to save and stop.
    agent_error: str = ""
    # The agent has ended, and no report says why.
    unexplained: bool = False
    failures: list[Failure] = field(default_factory=list[Failure])

    def root_cause(self) -> Failure:
        """Return the failure that explains the last one, which may be its consequence on another machine."""
        last = self.failures[-1]
        # Every machine numbers its own starts.
        together = [one for one in self.failures if (one.attempt == last.attempt if one.host == last.host else one.at > last.at - 15)]
        return next((one for one in together if not one.is_consequence), last)


def failure_of(folder: Path, attempt: int, ranks: int, exit_codes: dict[int, int], oom_killed: Callable[[], bool]) -> Failure:
    """Return the root cause among the ranks of an attempt, given the exit codes of those that ended by themselves.

    A rank whose error came first may end last: the agent has then killed it, and its error file tells.
    """
    by_itself, killed = list[Failure](), list[Failure]()
    for local in range(ranks):
        snapshot, cause, code = heartbeat.read(folder / str(local)), cause_of(folder / str(local)), exit_codes.get(local)
        rank, step = (snapshot.rank, snapshot.step) if snapshot else (local, -1)
        log = _written(folder / str(local) / "stderr.log")
        if code is not None:
            by_itself.append(Failure(rank, code, cause, attempt, step, code == -signal.SIGKILL and oom_killed(), log=log))
        elif (snapshot and snapshot.exit_code) or (folder / str(local) / "error.json").exists():
            killed.append(Failure(rank, (snapshot and snapshot.exit_code) or 1, cause, attempt, step, log=log))
    return next((one for one in by_itself + killed if not one.is_consequence), by_itself[0])


def _written(path: Path) -> str:
    with contextlib.suppress(OSError):
        return str(path) if path.stat().st_size else ""
    return ""


def exit_reasons(folder: Path | None, ranks: int, oom_killed: bool) -> list[Failure]:
    """Return what the ranks of an attempt have written of their own end; also that memory ran out, if the kernel OOM-killed the agent."""
    attempt = int(folder.name.partition("_")[2]) if folder else 0
    found = [snapshot for local in range(ranks) if folder and (snapshot := heartbeat.read(folder / str(local)))]
    said = [Failure(one.rank, one.exit_code, one.exit_reason, attempt, one.step) for one in found if one.exit_code]
    memory = Failure(None, -signal.SIGKILL, "", attempt, max((one.step for one in found), default=-1), oom_killed=True)
    return [*said, memory] if oom_killed else said


def cause_of(folder: Path) -> str:
    """Return a rank's own error, or what it wrote to stderr: its last line, unless an earlier one tells of a lost peer."""
    snapshot = heartbeat.read(folder)
    if snapshot and snapshot.exit_reason:
        return snapshot.exit_reason
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        message: Any = json.loads((folder / "error.json").read_text())["message"]
        return str(message if isinstance(message, str) else message["message"]).strip()
    with contextlib.suppress(OSError):
        lines = [line for line in (folder / "stderr.log").read_text(errors="replace").splitlines() if line.strip()]
        # NCCL's watchdog writes frames of C++ below it.
        lost = [line for line in lines[-200:] if "NCCL" in line and CONSEQUENCE.search(line)]
        return (lost or lines or [""])[-1].strip()
    return ""
