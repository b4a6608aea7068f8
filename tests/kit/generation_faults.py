"""What may happen to a simulated elastic job at any point."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.elastic.generations import machine_of

if TYPE_CHECKING:
    from tests.kit.generations import Job


def disconnect(job: Job, target: str, living: list[str]) -> None:
    """The network between two ranks that both live."""
    for group in job.groups.values():
        if target in group.generation.members:
            group.left.add(target)


def pause(job: Job, target: str, living: list[str]) -> None:
    """SIGSTOP and SIGCONT."""
    job.ranks[target].wakes_at = max(job.ranks[target].wakes_at, job.world.now) + 20


FAULTS: dict[str, Callable[[Job, str, list[str]], None]] = {
    "kill": lambda job, target, living: job.kill(target),
    "kill two": lambda job, target, living: job.kill(*{target, living[0]}),
    "kill all but one": lambda job, target, living: job.kill(*{*living} - {target}),
    "kill all": lambda job, target, living: job.kill(*living),
    "disconnect": disconnect,
    "pause": pause,
}


def lose(job: Job, target: str, living: list[str]) -> None:
    """A machine's power fails; its connections are closed, as by a container's end."""
    machine = job.machines[machine_of(target)]
    job.kill(*machine.ranks)
    assert machine.agent is not None
    machine.agent.alive, machine.agent.ended_at = False, job.world.now
    job.replace(machine)


def silence(job: Job, target: str, living: list[str]) -> None:
    """A machine stands still for a time, and no connection is closed."""
    machine = job.machines[machine_of(target)]
    machine.was_silent = True
    for one in (machine.agent, *(job.ranks[name] for name in machine.ranks)):
        assert one is not None
        one.wakes_at = max(one.wakes_at, job.world.now) + 20


def late(job: Job, target: str, living: list[str]) -> None:
    """A machine's agent stands still for a moment in which its ranks are at work, and a connection breaks."""
    machine = job.machines[machine_of(target)]
    machine.was_silent = True
    assert machine.agent is not None
    machine.agent.wakes_at = max(machine.agent.wakes_at, job.world.now) + 7
    disconnect(job, target, living)


def leave(job: Job, target: str, living: list[str]) -> None:
    """A machine is told to stop."""
    machine = job.machines[machine_of(target)]
    if not machine.leaves:
        machine.leaves = True
        job.replace(machine)


def comes_in_vain(job: Job, target: str, living: list[str]) -> None:
    """Another machine comes that reaches the store, and that no rank can reach."""
    job.replace(job.machines[machine_of(target)], unreachable=True)


MACHINE_FAULTS: dict[str, Callable[[Job, str, list[str]], None]] = {
    "lose": lose,
    "silence": silence,
    "late": late,
    "leave": leave,
    "comes in vain": comes_in_vain,
}
