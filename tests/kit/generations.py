"""The ranks of an elastic job in simulated time: their own protocol, with a model of what torch does for them.

A collective ends once all members of its group have come to it. It fails for whoever looks after a member has died or left, also where
another has seen it end: so survivors may be a step apart, as they may with gloo.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from pipeline.cluster.store import ClusterStore
from pipeline.elastic.generations import DONE, Coordinator, Generation, Member
from tests.kit.simulation import QUANTUM_SECONDS, Killed, Process, SimulatedClock, SimulatedServer, SimulatedStore, World

TOTAL, PER_CHECKPOINT = 6, 3


class Lost(Exception):
    """A collective has failed."""


class Group:
    """One generation's group: who has come to which collective, and with what."""

    def __init__(self, job: "Job", generation: Generation):
        self._job, self.generation = job, generation
        self._came: dict[Any, dict[str, Any]] = {}
        self.left: set[str] = set()

    def collective(self, process: Process, name: str, which: Any, value: Any = None) -> dict[str, Any]:
        """Return what all members brought, once all have come."""
        came = self._came.setdefault(which, {})
        came[name] = value
        while True:
            process.sleep(QUANTUM_SECONDS)
            if self.left or not all(self._job.lives(one) for one in self.generation.members):
                raise Lost
            if len(came) == len(self.generation.members):
                return came


class Job:
    """A coordinator, ranks that are started again, and what happens to them."""

    def __init__(self, world: World, ranks: int):
        self.world, self.wanted = world, ranks
        self.server = SimulatedServer(lambda key, value: None)
        self.groups: dict[int, Group] = {}
        self.ranks: dict[str, Process] = {}
        # The step that each rank holds the weights of.
        self.held: dict[str, int | None] = {}
        self.checkpoint, self.writer = 0, ""
        self.faults: list[tuple[float, str, str]] = []
        world.act = self.fault
        self.agent = world.start("agent", self._agent)
        for _ in range(ranks):
            self._start()

    def lives(self, name: str) -> bool:
        return self.ranks[name].alive

    def violated(self, what: str) -> None:
        self.world.violations.append(f"{what} at {self.world.now:.0f} s, after {self.faults}")

    # -- processes

    def _start(self) -> None:
        name = f"rank-{len(self.ranks)}"
        self.held[name] = None
        self.ranks[name] = self.world.start(name, lambda process: self._rank(process, name), self.world.now + 1)

    def _agent(self, process: Process) -> None:
        """Announces generations, and starts again who is lost."""
        store = ClusterStore(SimulatedStore(self.server, process), "agent")
        coordinator, gone = Coordinator(store, self.wanted, self.wanted, SimulatedClock(process)), set[str]()
        while any(one.alive for one in self.ranks.values()) or not store.get(DONE):
            for name in [name for name, one in self.ranks.items() if not one.alive and name not in gone]:
                gone.add(name)
                coordinator.lost(name)
                if not store.get(DONE):
                    self._start()
            coordinator.look()
            process.sleep(QUANTUM_SECONDS)

    def _rank(self, process: Process, name: str) -> None:
        clock = SimulatedClock(process)
        member = Member(ClusterStore(SimulatedStore(self.server, process), "agent"), name, clock)
        member.ready()
        while (generation := member.next()) is not None:
            group = self.groups.setdefault(generation.number, Group(self, generation))
            try:
                self._meet(process, name, group)
                if self._train(process, name, group, member):
                    return
            except Lost:
                group.left.add(name)
                member.failed()
            group.left.add(name)

    def _meet(self, process: Process, name: str, group: Group) -> None:
        """What Handover does."""
        group.collective(process, name, "form")
        steps = group.collective(process, name, "steps", self.held[name])
        known = [step for step in steps.values() if step is not None]
        if not known:
            outside = self.held.keys() - {*group.generation.members}
            holders = [one for one in outside if self.held[one] is not None and self.lives(one)]
            if holders:
                self.violated(f"generation {group.generation.number} begins at the checkpoint, and {holders} hold weights")
            self.held[name] = self.checkpoint
        elif len(known) < len(steps) or min(known) < max(known):
            if self.held[name] != max(known):
                self.held[name] = None
            group.collective(process, name, "weights")
            self.held[name] = max(known)
        first = group.generation.members[0]
        if name == first and self.writer not in ("", first) and self.lives(self.writer):
            self.violated(f"{first} writes, and {self.writer} lives")
        if name == first != self.writer:
            # What the one before was writing may be lost.
            self.writer, self.checkpoint = name, max(self.checkpoint, self._step(name))

    def _train(self, process: Process, name: str, group: Group, member: Member) -> bool:
        """Train to the end; returns False once all have agreed to enter a newer generation."""
        while (step := self._step(name)) < TOTAL:
            outdated = name == group.generation.members[0] and member.is_outdated()
            if any(group.collective(process, name, ("step", step), outdated).values()):
                return False
            further = [one for one, held in self.held.items() if held is not None and held > step and self.lives(one)]
            if set(further) - set(group.generation.members):
                self.violated(f"step {step} is done again, and {further} have done it")
            self.held[name] = step + 1
            if name == group.generation.members[0] and (step + 1) % PER_CHECKPOINT == 0:
                self.checkpoint = step + 1
        if name == group.generation.members[0]:
            self.checkpoint = TOTAL
            member.done()
        group.collective(process, name, "end")
        return True

    def _step(self, name: str) -> int:
        step = self.held[name]
        assert step is not None
        return step

    # -- faults

    def fault(self, action: tuple[str, int], current: Process) -> None:
        """Do a fault to the rank of a number, counted from the oldest that lives."""
        kind, number = action
        living = [name for name, one in self.ranks.items() if one.alive]
        if not living or DONE in self.server.values:
            return
        target = living[number % len(living)]
        self.faults.append((self.world.now, kind, target))
        FAULTS[kind](self, target, living)
        if not current.alive:
            raise Killed

    def kill(self, *names: str) -> None:
        for name in names:
            self.ranks[name].alive, self.ranks[name].ended_at = False, self.world.now


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


def explore(ranks: int, plan: dict[int, Any] | None = None, random: Random | None = None) -> Job:
    """Run a job to its end."""
    job = Job(World(plan, random), ranks)
    job.world.run()
    ended = [name for name, one in job.ranks.items() if one.ended_at < float("inf") and job.held[name] == TOTAL]
    if not job.world.violations and (job.checkpoint != TOTAL or not ended):
        job.violated(f"it ended at step {job.checkpoint}")
    return job
