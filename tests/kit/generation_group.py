"""A group of simulated ranks.

A collective ends once all members of its group have come to it. It fails for whoever looks after a member has died or left, also where
another has seen it end: so survivors may be a step apart, as they may with gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.elastic.generations import Generation, Member, machine_of
from tests.kit.simulation import QUANTUM_SECONDS, Process

if TYPE_CHECKING:
    from tests.kit.generations import Job


class Lost(Exception):
    """A collective has failed."""


class Group:
    """One generation's group: who has come to which collective, and with what."""

    def __init__(self, job: Job, generation: Generation):
        self._job, self.generation = job, generation
        self._came: dict[Any, dict[str, Any]] = {}
        self.left: set[str] = set()

    def collective(self, process: Process, member: Member, name: str, which: Any, value: Any = None) -> dict[str, Any]:
        """Return what all members brought, once all have come."""
        came, began_at = self._came.setdefault(which, {}), self._job.world.now
        came[name] = value
        while True:
            process.sleep(QUANTUM_SECONDS)
            if self.left or not all(self._job.lives(one) for one in self.generation.members):
                raise Lost
            machines = {machine_of(one) for one in self.generation.members}
            if which == "form" and len(machines) > 1 and machines & self._job.unreachable:
                raise Lost
            if self._job.world.now > began_at + 3 and (found := member.waits_in_vain()) and found[1]:
                # What Lookout does.
                raise Lost
            if len(came) == len(self.generation.members):
                return came
