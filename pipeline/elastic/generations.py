"""Who makes up the group: a coordinator announces one generation of ranks after the other, and ranks come to the newest.

A rank is ready once its model and data are there and its kernels are warm. A generation begins when all its ranks have arrived at it;
a newer one is announced when one of them is lost, or a further one is ready, and ranks that have not begun may all go on to that.

A machine's agent tells which of its ranks have ended. Of a machine that is lost itself nobody tells: if ranks wait, and its agent's
heartbeat does not change, or is another agent's by now, its ranks are left out; those that live after all ask to be in again.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from pipeline.cluster.messages import LEADER, Clock
from pipeline.cluster.store import ClusterStore

# The variable with the address of the store.
STORE = "LOCKSTEP_GENERATIONS"
# The variables that tell the ranks of one machine from another's, and one that was started again from the one before.
MACHINE, INCARNATION = "LOCKSTEP_MACHINE", "LOCKSTEP_INCARNATION"
# Lists in the store: ranks that are ready, and ranks that have ended.
READY, LOST = "ready", "lost"
# Values there: the newest generation, the newest that leaves a silent machine out, whether the training is over, who are the workers.
NEWEST, SILENT, DONE, WORKERS = "generation", "silent", "done", "members"
# A failed collective mostly has a lost rank as its cause, which its agent has yet to tell.
PATIENCE_SECONDS = 1.0
# An agent's heartbeat changes so often.
HEARTBEAT_SECONDS = 0.25
# How long ranks are waited for, of which none holds the weights.
START_SECONDS = 30.0
LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.005, 0.25
# A rank that has failed to enter so many generations in a row ends.
MOST_IN_VAIN = 10


def name_of(environment: Mapping[str, str]) -> str:
    """A rank's name, by its machine, agent and number: no other process of the job ever has it."""
    return f"{environment.get(MACHINE, LEADER)}:{environment[INCARNATION]}.{environment['LOCAL_RANK']}"


def machine_of(name: str) -> str:
    """The machine of a rank."""
    return name.rpartition(":")[0]


def agent_of(name: str) -> str:
    """The agent that has started a rank."""
    return name.rpartition(":")[2].partition(".")[0]


def heartbeat_of(machine: str) -> str:
    """Where a machine's agent shows that it is alive."""
    return f"beats/{machine}"


@dataclass(frozen=True)
class Generation:
    """The ranks of one group, in their order; the first writes the journal and the checkpoints."""

    number: int
    members: list[str]


class Coordinator:
    """Announces generations; it outlives all ranks, and there is one for a job, on the leader."""

    def __init__(self, store: ClusterStore, wanted: int, most: int, clock: Clock = time):
        self._store, self._wanted, self._most, self._clock = store, wanted, most, clock
        # Who is ready and not lost, in the order in which they came.
        self._ready: list[str] = []
        self._lost: set[str] = set()
        self._num_ready, self._num_lost = 0, 0
        self._generation = Generation(-1, [])
        self._first_ready_at = inf
        # Since when ranks wait for one that does not come or has failed, and every machine's heartbeat then.
        self._waiting_since, self._heartbeats = inf, dict[str, Any]()
        self._failed, self._silent = False, False

    def look(self) -> Generation | None:
        """Announce the next generation, if there is to be one."""
        now, members = self._clock.monotonic(), self._generation.members
        self._read(now)
        waits_long = now > self._waiting_since + PATIENCE_SECONDS
        if waits_long:
            heard = {one: self._store.get(heartbeat_of(one)) for one in self._heartbeats}
            living = {(one, heartbeat[0]) for one, heartbeat in heard.items() if heartbeat != self._heartbeats[one]}
            self._keep(lambda name: machine_of(name) not in heard or (machine_of(name), agent_of(name)) in living)
        alive = self._alive()
        if not alive or machine_of(alive[0]) != LEADER:
            due = False
        elif not set(members) & set(alive):
            # Nobody holds the weights but the checkpoint: they begin together.
            self._first_ready_at = min(self._first_ready_at, now)
            due = len(alive) >= self._wanted or now > self._first_ready_at + START_SECONDS
        else:
            due = alive != members or (waits_long and self._failed)
        if waits_long:
            self._waiting_since = inf
        return self._announce(alive) if due else None

    def _announce(self, members: list[str]) -> Generation:
        self._generation = Generation(self._generation.number + 1, members)
        self._first_ready_at, self._waiting_since = inf, inf
        number = self._generation.number
        self._store.put(f"{NEWEST}/{number}", members)
        if self._silent:
            self._store.put(SILENT, number)
        self._store.put(NEWEST, number)
        self._silent = False
        return self._generation

    def _alive(self) -> list[str]:
        """The members of the next generation: those that were ready first, one of the leader's machine among them, and those in front."""
        first = [name for name in self._ready if machine_of(name) == LEADER][:1]
        found = first + [name for name in self._ready if name not in first]
        return sorted(found[: self._most], key=lambda name: machine_of(name) != LEADER)

    def _read(self, now: float) -> None:
        for name in self._store.since(READY, self._num_ready):
            self._num_ready += 1
            if name not in self._ready:
                self._ready.append(name)
        lost = self._store.since(LOST, self._num_lost)
        self._num_lost += len(lost)
        self._lost.update(lost)
        self._ready = [name for name in self._ready if name not in self._lost]
        if any(machine_of(name) != LEADER for name in self._ready):
            workers = {LEADER, *(self._store.get(WORKERS) or ())}
            self._keep(lambda name: machine_of(name) in workers)
        members, where = self._generation.members, f"{NEWEST}/{self._generation.number}"
        self._failed = bool(self._store.get(f"{where}/failed"))
        if not self._failed and (self._store.get(f"{where}/arrived") or 0) == len(members):
            self._waiting_since = inf
        elif self._waiting_since == inf:
            self._waiting_since = now
            self._heartbeats = {one: self._store.get(heartbeat_of(one)) for one in {*map(machine_of, members)} - {LEADER}}

    def _keep(self, is_there: Callable[[str], bool]) -> None:
        """Forget the ranks of machines that are silent; whoever waits for them is to wait no longer."""
        before = len(self._ready)
        self._ready = [name for name in self._ready if is_there(name)]
        self._silent |= len(self._ready) < before


class Member:
    """One rank's way from generation to generation."""

    def __init__(self, store: ClusterStore, name: str, clock: Clock = time):
        self._store, self._name, self._clock = store, name, clock
        self._generation = Generation(-1, [])

    def ready(self) -> None:
        """Ask to be in the next generation."""
        self._store.append(READY, self._name)

    def leave(self) -> None:
        """Ask not to be in the next generation."""
        lost(self._store, self._name)

    def next(self, given_up: Callable[[], bool] = lambda: False) -> Generation | None:
        """Return the next generation, once this rank and all others of it have arrived; None if it gives up, or the training is over."""
        arrived, began_at, asked_at = Generation(self._generation.number, []), self._clock.monotonic(), self._generation.number
        while not given_up() and not self._store.get(DONE):
            newest = self._newest() or arrived
            if newest.number > arrived.number and self._name in newest.members:
                if arrived.members and self._is_entered(arrived, False):
                    return self._entering(arrived)
                # A number, not their names: of many ranks each would ask for each.
                self._store.count(f"{NEWEST}/{newest.number}/arrived")
                arrived = newest
            elif newest.number > max(arrived.number, asked_at):
                # Left out, perhaps as one that was silent.
                asked_at = newest.number
                self.ready()
            complete = arrived.members and self._store.get(f"{NEWEST}/{arrived.number}/arrived") == len(arrived.members)
            if complete and self._is_entered(arrived, True):
                return self._entering(arrived)
            # The longer it waits, the less often it asks: many ranks would take the store's time.
            self._clock.sleep(min(LONGEST_LOOK_SECONDS, max(LOOK_SECONDS, (self._clock.monotonic() - began_at) / 10)))
        return None

    def _is_entered(self, generation: Generation, wish: bool) -> bool:
        """Return whether a generation is entered, or left out for a newer one: all its ranks do what the first of them wished."""
        return bool(self._store.decide(f"{NEWEST}/{generation.number}/entered", wish))

    def _entering(self, generation: Generation) -> Generation:
        self._generation = generation
        return generation

    def _newest(self) -> Generation | None:
        number: int | None = self._store.get(NEWEST)
        return None if number is None else Generation(number, self._store.get(f"{NEWEST}/{number}"))

    def done(self) -> None:
        """Tell that the training is over, whoever is lost from here on."""
        self._store.put(DONE, True)

    def failed(self) -> None:
        """Tell that a collective of this generation has failed."""
        self._store.count(f"{NEWEST}/{self._generation.number}/failed")

    def is_outdated(self) -> bool:
        """Return whether a newer generation is announced."""
        newest: int = self._store.get(NEWEST)
        return newest > self._generation.number

    def waits_in_vain(self) -> tuple[int, bool] | None:
        """Return this generation's number if a newer one leaves some of its ranks out, and whether because their machine is silent."""
        own, newest = self._generation, self._newest()
        if newest is None or newest.number <= own.number or set(own.members) <= set(newest.members):
            return None
        silent: int | None = self._store.get(SILENT)
        return own.number, silent is not None and silent > own.number


def lost(store: ClusterStore, name: str) -> None:
    """Tell that a rank has ended, or leaves."""
    store.append(LOST, name)
