"""The watchdog: finds from the heartbeats of this machine's ranks which rank hangs, which one the others wait for, and which are gone."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from pipeline import heartbeat
from pipeline.hardware.cgroup import OomKills
from pipeline.heartbeat import AT_WORK, COMPUTING, FINISHING, LEAVING, OUTSIDE, Snapshot
from pipeline.launch.failures import HUNG, Failure
from pipeline.process_tree import FirstSeen, status_of
from pipeline.timeouts import START_SECONDS

CHECK_SECONDS = 0.5
# How long ranks have to write their stacks before they are killed.
DUMP_SECONDS = 0.3
# An OOM kill so near to the loss of a process explains it.
NEAR_SECONDS = 3
# A rank outside of any group beats several times a second; one that has not for so long is judged with those that are in one.
QUIET_SECONDS = 5
# A rank for which the others wait during so large a share of so much time is slow.
SLOW_SHARE, SLOW_SECONDS = 0.6, 30


class Watchdog:
    """Polled by the supervisor; compares heartbeats on the monotonic clock."""

    def __init__(self, logs: Path, ranks: int, others: bool, limit_seconds: float, say: Callable[[str], None]):
        self._logs, self._ranks, self._others, self._limit, self._say = logs, ranks, others, limit_seconds, say
        self._checked_at = self._changed_at = self._complete_at = self._window_at = time.monotonic()
        self._folder: Path | None = None
        self._processes = FirstSeen()
        self._seen, self._alive, self._judged = dict[int, tuple[float, Snapshot]](), dict[int, Snapshot](), dict[int, Snapshot]()
        self._warned_of_idle, self._warned_of_slow, self._hung_attempt = False, False, -1
        self._waited_for, self._oom_kills = dict[int, float](), OomKills()

    def started(self, folder: Path) -> None:
        """Watch the ranks of a new attempt, whose heartbeats are in this folder."""
        self._folder, self._processes = folder, FirstSeen()

    def check(self) -> Failure | None:
        """Return a failure if no rank has advanced for the timeout, with the rank that holds the others up; all stacks are then written."""
        now = time.monotonic()
        since = now - self._checked_at
        if since < CHECK_SECONDS:
            return None
        self._checked_at = now
        if since > 5 * CHECK_SECONDS:
            # This process was suspended too, as by `docker pause`: that time does not count.
            self._changed_at += since
            self._complete_at += since
            self._window_at += since
        self._oom_kills.noticed_at(now)
        folder, attempt = self._folder, int(self._folder.name.partition("_")[2]) if self._folder else 0
        snapshots = {local: snapshot for local in range(self._ranks) if folder and (snapshot := heartbeat.read(folder / str(local)))}
        self._alive = {local: snapshot for local, snapshot in snapshots.items() if self._processes.runs(snapshot.pid)}
        judged, complete = self._in_a_group(snapshots, now), len(self._alive) == self._ranks
        alive = {local: snapshot for local, snapshot in judged.items() if local in self._alive}
        if judged != self._judged or (snapshots and not alive):
            self._judged, self._changed_at, self._hung_attempt = judged, now, -1
        self._complete_at = now if len(self._alive) == len(snapshots) else self._complete_at
        self._warn_of_slow(alive, since, now)
        # Imports, all that comes before the first step, and writing the model may take longer than a step.
        stepping = complete and all(one.step >= 0 and one.phase not in (FINISHING, LEAVING) for one in alive.values())
        limit = self._limit if stepping else max(self._limit, START_SECONDS)
        idle = now - self._changed_at
        if alive and idle > limit / 4 and not self._warned_of_idle:
            self._warned_of_idle = True
            _, why, _ = self._straggler(alive)
            self._say(f"{why}; this has been so for {idle:.0f} s, and may be for {limit:.0f} s (dist.timeout_seconds)")
        if idle <= limit or attempt == self._hung_attempt or (self._others and not alive):
            return None
        self._hung_attempt = attempt
        return self._hung(alive, attempt, limit)

    def _in_a_group(self, snapshots: dict[int, Snapshot], now: float) -> dict[int, Snapshot]:
        """Return all but those that wait outside of any group and beat: that does not hide one that hangs."""
        before = self._seen
        self._seen = {one: before[one] if one in before and before[one][1] == new else (now, new) for one, new in snapshots.items()}
        return {one: new for one, new in snapshots.items() if new.phase != OUTSIDE or now > self._seen[one][0] + QUIET_SECONDS}

    def kill_ranks(self) -> None:
        """Kill the ranks, unless they have got on since they were found to hang; the agent starts them again."""
        for local in self._judged.keys() & self._alive.keys() if self._hung_attempt >= 0 else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._alive[local].pid, signal.SIGKILL)

    def oom_killed(self, lost_at: float | None = None) -> bool:
        """Return True if the kernel killed a process for lack of memory near this time; without one, when a rank was lost."""
        return abs(self._oom_kills.noticed_at(time.monotonic()) - (lost_at or self._complete_at)) < NEAR_SECONDS

    def _straggler(self, alive: dict[int, Snapshot]) -> tuple[int | None, str, bool]:
        """Return rank (or None), a description, and True if it only waits for another machine: the rank that holds the others up."""
        for snapshot in alive.values():
            if status_of(snapshot.pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return snapshot.rank, f"rank {snapshot.rank} is stopped (SIGSTOP) in step {snapshot.step}", False
        if len(self._alive) < self._ranks:
            return None, f"{self._ranks - len(self._alive)} of {self._ranks} ranks here have not begun", False
        last = min(alive.values(), key=lambda one: (one.step, one.phase not in AT_WORK, one.rank))
        together = len({(one.step, one.phase) for one in alive.values()}) == 1
        if self._others and together and last.phase not in AT_WORK:
            return last.rank, f"rank {last.rank} waits in step {last.step} for another machine's", True
        if together and len(alive) > 1:
            return None, f"no rank gets on in step {last.step}, and all are in the same place", False
        return last.rank, f"rank {last.rank} stands still in step {last.step}", False

    def _hung(self, alive: dict[int, Snapshot], attempt: int, limit: float) -> Failure:
        who, why, waits = self._straggler(alive)
        states = {snapshot.pid: status_of(snapshot.pid) for snapshot in self._alive.values()}
        for snapshot in self._alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(snapshot.pid, signal.SIGUSR1)
                # A stopped process handles SIGUSR1 once it is continued; it is killed right after.
                os.kill(snapshot.pid, signal.SIGCONT)
        time.sleep(DUMP_SECONDS)
        for local, snapshot in self._alive.items():
            assert self._folder is not None
            with contextlib.suppress(OSError), (self._folder / str(local) / "stacks.log").open("a") as file:
                file.write(f"rank {snapshot.rank}, process {snapshot.pid}: {states[snapshot.pid]}, step {snapshot.step}\n")
        step = min((snapshot.step for snapshot in alive.values()), default=-1)
        where = f"stacks of all ranks: {self._logs}/**/stacks.log"
        cause = f"{why}; that was so for {limit:.0f} s (dist.timeout_seconds; raise it if that can be right); {where}"
        return Failure(who, HUNG, cause, attempt, step, waiting=waits)

    def _warn_of_slow(self, alive: dict[int, Snapshot], since: float, now: float) -> None:
        """Warn once of a rank for which the others wait most of the time."""
        working = [snapshot for snapshot in alive.values() if snapshot.phase == COMPUTING]
        if len(working) == 1 < len(alive):
            self._waited_for[working[0].rank] = self._waited_for.get(working[0].rank, 0.0) + since
        if now - self._window_at < SLOW_SECONDS:
            return
        for rank, seconds in self._waited_for.items():
            if seconds > SLOW_SHARE * (now - self._window_at) and not self._warned_of_slow:
                self._warned_of_slow = True
                share = 100 * seconds / (now - self._window_at)
                cure = "look at its device, or where ranks may own unequal numbers, give it fewer lanes (dist.lanes_per_rank)"
                self._say(f"rank {rank} is slow: the others wait for it {share:.0f} % of the time; {cure}")
        self._waited_for, self._window_at = {}, now
