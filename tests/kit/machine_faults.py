"""What may happen to a simulated machine at any point."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.kit.simulation import Killed, Process

if TYPE_CHECKING:
    from tests.kit.machines import Machines

LONG_SECONDS, SHORT_SECONDS, CLOCK_SECONDS = 20, 7, 8


def crash(machines: Machines, target: Process, current: Process) -> None:
    """SIGKILL."""
    target.alive, target.ended_at = False, machines.world.now
    if target is current:
        raise Killed


def crash_and_return(machines: Machines, target: Process, current: Process) -> None:
    """SIGKILL of a container that a restart policy starts again: under the same name, as all its processes have the same numbers."""
    if target in machines.workers:
        machines.start_worker(target.name, machines.world.now + 3)
    crash(machines, target, current)


def pause(seconds: float, machines: Machines, target: Process, current: Process) -> None:
    """SIGSTOP and SIGCONT, or a network that is silent for a time."""
    target.wakes_at = max(target.wakes_at, machines.world.now) + seconds
    if target is current:
        current.sleep(seconds)


def pause_all(machines: Machines, target: Process, current: Process) -> None:
    """A laptop that sleeps."""
    for one in machines.world.processes:
        one.wakes_at = max(one.wakes_at, machines.world.now) + LONG_SECONDS
    current.sleep(LONG_SECONDS)


def late(machines: Machines, target: Process, current: Process) -> None:
    """A worker that takes long to prepare its data."""
    target.check_seconds = 30


def clock(seconds: float, machines: Machines, target: Process, current: Process) -> None:
    """A clock that is wrong from now on."""
    target.clock_offset = seconds


def term(machines: Machines, target: Process, current: Process) -> None:
    """SIGTERM."""
    machines.signalled.setdefault(target.name, machines.world.now)
    if machines.takes_part(target):
        machines.stopping_since = min(machines.stopping_since, machines.world.now)
    target.told_to_stop_in = machines.current_job()
    if target.on_term is None:
        crash(machines, target, current)
    target.signalled = lambda: target.on_term and target.on_term()
    target.wakes_at = min(target.wakes_at, machines.world.now)


def lose_store(machines: Machines, target: Process, current: Process) -> None:
    """SIGKILL of all that runs on the leader."""
    machines.server.is_open = False
    for one in (machines.leader, machines.stage):
        if one and one.alive:
            one.alive, one.ended_at = False, machines.world.now
    if not current.alive:
        raise Killed


CLOCKS = ("clock ahead", "clock behind")
FAULTS: dict[str, Callable[[Machines, Process, Process], None]] = {
    "crash": crash,
    "crash and return": crash_and_return,
    "short pause": partial(pause, SHORT_SECONDS),
    "long pause": partial(pause, LONG_SECONDS),
    "pause of all": pause_all,
    "late answer": late,
    "clock ahead": partial(clock, CLOCK_SECONDS),
    "clock behind": partial(clock, -CLOCK_SECONDS),
    "SIGTERM": term,
    "store lost": lose_store,
}
# What only a worker may suffer.
OF_WORKERS = ("crash and return", "late answer", *CLOCKS)
