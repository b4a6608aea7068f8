"""The ranks of an elastic job in simulated time: their own protocol, with a model of what torch does for them."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from pipeline.cluster.messages import LEADER, MEMBERS
from pipeline.cluster.store import ClusterStore
from pipeline.elastic import coordinator, generations
from pipeline.elastic.coordinator import Coordinator
from pipeline.elastic.generations import DONE, Member, heartbeat_of, lost, machine_of
from tests.kit.generation_faults import FAULTS, MACHINE_FAULTS
from tests.kit.generation_group import Group, Lost
from tests.kit.simulation import QUANTUM_SECONDS, Killed, Process, SimulatedClock, SimulatedServer, SimulatedStore, World

TOTAL, PER_CHECKPOINT = 6, 3
# Here all that sleep do so for a second at least: an agent is heard of as often in this time as in the real one.
coordinator.PATIENCE_SECONDS = QUANTUM_SECONDS * coordinator.PATIENCE_SECONDS / generations.HEARTBEAT_SECONDS
# When a machine is taken for lost, and when another one comes in its place.
SILENT_SECONDS, NEXT_SECONDS = 8, 12

# A tenth of what a rank takes to give up.
MANY_IN_VAIN = 10


@dataclass
class Machine:
    """One agent and its ranks."""

    name: str
    num_ranks: int
    agent: Process | None = None
    ranks: list[str] = field(default_factory=list)
    # It was told to stop; it was silent at some time.
    leaves: bool = False
    was_silent: bool = False


class Job:
    """A coordinator, ranks that are started again, machines that come and go, and what happens to them."""

    def __init__(self, world: World, ranks: int, workers: int = 0, most: int | None = None):
        self.world, self.wanted = world, ranks * (1 + workers)
        self.most = most or self.wanted
        # Machines that reach the store, and with which no group forms.
        self.unreachable: set[str] = set()
        self.machines: dict[str, Machine] = {}
        self.server = SimulatedServer(lambda key, value: None)
        self.groups: dict[int, Group] = {}
        self.ranks: dict[str, Process] = {}
        # The step that each rank holds the weights of.
        self.held: dict[str, int | None] = {}
        self.told: dict[str, bool] = {}
        self.checkpoint, self.writer = 0, ""
        self.faults: list[tuple[float, str, str]] = []
        world.act = self.fault
        for number in range(1 + workers):
            self._come(LEADER if number == 0 else f"worker/{number}", ranks)
        if workers:
            world.start("stage", self._admit)

    def lives(self, name: str) -> bool:
        return self.ranks[name].alive

    def counts(self, name: str) -> bool:
        """Whether a rank is one that the others have to know of."""
        return self.lives(name) and not self.machines[machine_of(name)].was_silent

    def violated(self, what: str) -> None:
        self.world.violations.append(f"{what} at {self.world.now:.0f} s, after {self.faults}")

    # -- processes

    def _come(self, name: str, num_ranks: int, in_seconds: float = 0) -> None:
        """A machine comes; the stage is to let it in before its ranks start."""
        machine = self.machines[name] = Machine(name, num_ranks)
        machine.agent = self.world.start(f"agent of {name}", lambda process: self._agent(process, machine), self.world.now + in_seconds)

    def _start(self, machine: Machine) -> None:
        name = f"{machine.name}:agent.{len(self.ranks)}"
        self.held[name] = None
        machine.ranks.append(name)
        self.ranks[name] = self.world.start(name, lambda process: self._rank(process, name), self.world.now + 1)

    def is_there(self, machine: Machine, process: Process) -> bool:
        agent = machine.agent
        assert agent is not None
        return agent.alive and agent.wakes_at < self.world.now + SILENT_SECONDS and not machine.leaves

    def _admit(self, process: Process) -> None:
        """What the leader's stage does."""
        store, admitted = ClusterStore(SimulatedStore(self.server, process), "stage"), list[str]()
        while not store.get(DONE):
            there = [one.name for one in self.machines.values() if one.name != LEADER and self.is_there(one, process)]
            if there != admitted:
                admitted = there
                store.put(MEMBERS, admitted)
            process.sleep(QUANTUM_SECONDS)

    def _agent(self, process: Process, machine: Machine) -> None:
        """Starts again who is lost; the leader's announces generations."""
        store = ClusterStore(SimulatedStore(self.server, process), "agent")
        leads, gone = machine.name == LEADER, set[str]()
        coordinator = Coordinator(store, min(self.wanted, self.most), self.most, SimulatedClock(process)) if leads else None
        while not leads and machine.name not in (store.get(MEMBERS) or []):
            if store.get(DONE):
                return
            process.sleep(QUANTUM_SECONDS)
        for _ in range(machine.num_ranks):
            self._start(machine)
        while any(self.lives(name) for name in machine.ranks) or not (store.get(DONE) or machine.leaves):
            for name in [name for name in machine.ranks if not self.lives(name) and name not in gone]:
                gone.add(name)
                lost(store, name)
                if not store.get(DONE) and not machine.leaves:
                    self._start(machine)
            if coordinator:
                coordinator.look()
            elif not machine.leaves and not store.get(DONE) and machine.name not in store.get(MEMBERS):
                # Others do it; this machine may be needed again.
                self.kill(*machine.ranks)
                self._come(f"{machine.name}'", machine.num_ranks)
                return
            else:
                store.put(heartbeat_of(machine.name), ["agent", self.world.now])
            process.sleep(QUANTUM_SECONDS)

    def _rank(self, process: Process, name: str) -> None:
        clock = SimulatedClock(process)
        member = Member(ClusterStore(SimulatedStore(self.server, process), "agent"), name, clock)
        machine, in_vain = self.machines[machine_of(name)], 0
        member.ready()
        while (generation := member.next(lambda: machine.leaves)) is not None:
            group = self.groups.setdefault(generation.number, Group(self, generation))
            try:
                self._meet(process, member, name, group)
                in_vain = 0
                if self._train(process, name, group, member):
                    return
            except Lost:
                group.left.add(name)
                member.failed()
                in_vain += 1
                if in_vain > MANY_IN_VAIN:
                    self.violated(f"{name} gives up")
                    return
            group.left.add(name)

    def _meet(self, process: Process, member: Member, name: str, group: Group) -> None:
        """What Handover does."""
        group.collective(process, member, name, "form")
        if name == group.generation.members[0]:
            member.formed()
        steps = group.collective(process, member, name, "steps", self.held[name])
        known = [step for step in steps.values() if step is not None]
        if not known:
            outside = self.held.keys() - {*group.generation.members}
            holders = [one for one in outside if self.held[one] is not None and self.counts(one)]
            if holders:
                self.violated(f"generation {group.generation.number} begins at the checkpoint, and {holders} hold weights")
            self.held[name] = self.checkpoint
        elif len(known) < len(steps) or min(known) < max(known):
            if self.held[name] != max(known):
                self.held[name] = None
            group.collective(process, member, name, "weights")
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
            if self.machines[machine_of(name)].leaves and not self.told.get(name):
                self.told[name] = True
                member.leave()
            if name == group.generation.members[0]:
                member.waits_in_vain()
            outdated = name == group.generation.members[0] and member.is_outdated()
            if any(group.collective(process, member, name, ("step", step), outdated).values()):
                return False
            further = [one for one, held in self.held.items() if held is not None and held > step and self.counts(one)]
            if set(further) - set(group.generation.members):
                self.violated(f"step {step} is done again, and {further} have done it")
            self.held[name] = step + 1
            if name == group.generation.members[0] and (step + 1) % PER_CHECKPOINT == 0:
                self.checkpoint = step + 1
        if name == group.generation.members[0]:
            self.checkpoint = TOTAL
            member.done()
        group.collective(process, member, name, "end")
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
        if kind in MACHINE_FAULTS and machine_of(target) == LEADER:
            return
        self.faults.append((self.world.now, kind, target))
        (FAULTS | MACHINE_FAULTS)[kind](self, target, living)
        if not current.alive:
            raise Killed

    def kill(self, *names: str) -> None:
        for name in names:
            if self.ranks[name].alive:
                self.ranks[name].alive, self.ranks[name].ended_at = False, self.world.now

    def replace(self, machine: Machine, unreachable: bool = False) -> None:
        name = f"next-of/{len(self.machines)}"
        self.unreachable |= {name} if unreachable else set()
        self._come(name, machine.num_ranks, NEXT_SECONDS)


def explore(ranks: int, plan: dict[int, Any] | None = None, random: Random | None = None, workers: int = 0, most: int | None = None) -> Job:
    """Run a job to its end."""
    job = Job(World(plan, random), ranks, workers, most)
    job.world.run()
    ended = [name for name, one in job.ranks.items() if one.ended_at < float("inf") and job.held[name] == TOTAL]
    if not job.world.violations and (job.checkpoint != TOTAL or not ended):
        job.violated(f"it ended at step {job.checkpoint}")
    return job
