"""The watchdog: sees from the pulses of this machine's ranks who stands still, whom the others wait for, and who is gone."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from pipeline.launch.failure import HUNG, Failure, folder_of, newest_attempt, sign_of
from pipeline.pulse import COMPUTING, Sign

LOOK_SECONDS = 0.5
# How long ranks may outlive one of them, and how long they have to write down their stacks.
OUTLIVE_SECONDS, DUMP_SECONDS = 6, 0.3
# A rank for which the others wait in so large a share of so much time is slow.
SLOW_SHARE, SLOW_SECONDS = 0.6, 30


class Watchdog:
    """Called all the time; all its durations are monotonic."""

    def __init__(self, logs: Path, ranks: int, others: bool, limit_seconds: float, say: Callable[[str], None]):
        self._logs, self._ranks, self._others, self._limit, self._say = logs, ranks, others, limit_seconds, say
        self._looked_at = self._changed_at = self._whole_at = self._window_at = time.monotonic()
        self._seen: dict[int, Sign] = {}
        self._warned = False
        self._behind: dict[int, float] = {}
        self._starved, self._starved_at = _oom_kills(), -60.0

    def look(self) -> Failure | None:
        """The rank that has stood still for longer than it may, if one has; its stacks are then written down."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return None
        since, self._looked_at = now - self._looked_at, now
        self._look_at_memory(now)
        attempt = newest_attempt(self._logs)
        signs = {local: sign for local in range(self._ranks) if (sign := sign_of(folder_of(self._logs, attempt, local)))}
        alive = {local: sign for local, sign in signs.items() if Path(f"/proc/{sign.pid}").exists() and not _is_zombie(sign.pid)}
        if signs != self._seen or not alive:
            self._seen, self._changed_at = signs, now
        self._whole_at = now if len(alive) == len(signs) else self._whole_at
        if alive and now - self._whole_at > OUTLIVE_SECONDS:
            # Their peer is gone and they have not noticed: torchrun would give them 30 s.
            for sign in alive.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(sign.pid, signal.SIGKILL)
            return None
        self._look_for_slow(alive, since, now)
        idle = now - self._changed_at
        if alive and idle > self._limit / 4 and not self._warned:
            self._warned = True
            who, why, _ = self._late(alive)
            self._say(
                f"rank {who} {why}; the others have waited for {idle:.0f} s, and wait {self._limit:.0f} s at most (dist.timeout_seconds)"
            )
        return self._hung(alive, attempt) if alive and idle > self._limit else None

    def starved(self) -> bool:
        """Whether the kernel has just ended a process for want of memory."""
        self._look_at_memory(time.monotonic())
        return time.monotonic() - self._starved_at < 60

    def _look_at_memory(self, now: float) -> None:
        before, self._starved = self._starved, _oom_kills()
        if self._starved > before:
            self._starved_at = now

    def _late(self, alive: dict[int, Sign]) -> tuple[int, str, bool]:
        """Whom all wait for, in what state it is, and whether it waits itself, as for another machine's."""
        for sign in alive.values():
            if _status(sign.pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return sign.rank, f"is stopped (SIGSTOP) in step {sign.step}", False
        if len(alive) < self._ranks:
            return max(set(range(self._ranks)) - set(alive)), "has not come to the others", False
        last = min(alive.values(), key=lambda one: (one.step, one.phase != COMPUTING, one.rank))
        together = all((one.step, one.phase) == (last.step, last.phase) for one in alive.values())
        if self._others and together and last.phase != COMPUTING:
            return last.rank, f"waits in step {last.step} for another machine's", True
        return last.rank, f"stands still in step {last.step}", False

    def _hung(self, alive: dict[int, Sign], attempt: int) -> Failure:
        who, why, waits = self._late(alive)
        states = {sign.pid: _status(sign.pid) for sign in alive.values()}
        for sign in alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(sign.pid, signal.SIGUSR1)
                # A stopped one writes when it goes on, and is ended right after.
                os.kill(sign.pid, signal.SIGCONT)
        time.sleep(DUMP_SECONDS)
        for local, sign in alive.items():
            folder = folder_of(self._logs, attempt, local)
            assert folder is not None
            with (folder / "stacks.log").open("a") as file:
                file.write(f"rank {sign.rank}, process {sign.pid}: {states[sign.pid]}, step {sign.step}, beat {sign.beats}\n")
        step = min(sign.step for sign in alive.values())
        limit, self._limit = self._limit, math.inf
        cause = f"{why}; the others waited {limit:.0f} s for it (dist.timeout_seconds); stacks of all ranks: {self._logs}/**/stacks.log"
        return Failure(who, HUNG, f"rank {who} {cause}", attempt, step, waiting=waits)

    def _look_for_slow(self, alive: dict[int, Sign], since: float, now: float) -> None:
        """Warn once of a rank that the others wait for most of the time."""
        working = [sign for sign in alive.values() if sign.phase == COMPUTING]
        if len(working) == 1 < len(alive):
            self._behind[working[0].rank] = self._behind.get(working[0].rank, 0.0) + since
        if now - self._window_at < SLOW_SECONDS:
            return
        for rank, seconds in self._behind.items():
            if seconds > SLOW_SHARE * (now - self._window_at) and not self._warned:
                self._warned = True
                cure = "look at its device, or give it fewer lanes (dist.lanes_per_rank)"
                self._say(
                    f"rank {rank} is slow: the others wait for it {100 * seconds / (now - self._window_at):.0f} % of the time; {cure}"
                )
        self._behind, self._window_at = {}, now


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def _is_zombie(pid: int) -> bool:
    return _status(pid) in (psutil.STATUS_ZOMBIE, "gone")


def _oom_kills() -> int:
    """How many processes the kernel has ended for want of memory."""
    path = Path("/proc/vmstat")
    fields = path.read_text().split() if path.exists() else []
    return int(fields[fields.index("oom_kill") + 1]) if "oom_kill" in fields else 0
