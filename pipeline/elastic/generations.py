"""Who makes up the group: a coordinator announces one generation of ranks after the other, and ranks come to the newest.

A rank is ready once its model and data are there and its kernels are warm. A generation begins when all its ranks have arrived at it;
a newer one is announced when one of them is lost, or a further one is ready, and ranks that have not begun may all go on to that.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from pipeline.cluster.messages import Clock
from pipeline.cluster.store import ClusterStore

# The variable with the address of the store.
STORE = "LOCKSTEP_GENERATIONS"
# The variable that tells a rank that was started again from the one before.
INCARNATION = "LOCKSTEP_INCARNATION"
# Lists in the store: ranks that are ready, ranks that have ended, and [generation, rank] of collectives that failed.
READY, LOST, FAILED = "ready", "lost", "failed"
NEWEST, DONE = "generation", "done"
# A failed collective mostly has a lost rank as its cause, which its agent has yet to hear of.
PATIENCE_SECONDS = 1.0
# How long ranks are waited for, of which none holds the weights.
START_SECONDS = 30.0
LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.005, 0.25
# A rank that has failed to enter so many generations in a row ends.
MOST_IN_VAIN = 10


def name_of(environment: Mapping[str, str]) -> str:
    """A rank's name: no other process of the job ever has it."""
    return f"{environment['LOCAL_RANK']}.{environment.get(INCARNATION, '0')}"


@dataclass(frozen=True)
class Generation:
    """The ranks of one group, in their order; the first writes the journal and the checkpoints."""

    number: int
    members: list[str]


class Coordinator:
    """Announces generations; it outlives all ranks, and there is one for a job."""

    def __init__(self, store: ClusterStore, wanted: int, most: int, clock: Clock = time):
        self._store, self._wanted, self._most, self._clock = store, wanted, most, clock
        self._ready: list[str] = []
        self._lost: set[str] = set()
        self._num_lost, self._num_failed = 0, 0
        self._generation = Generation(-1, [])
        self._failed_at, self._first_ready_at = inf, inf

    def lost(self, name: str) -> None:
        """Learn that a rank has ended."""
        self._store.append(LOST, name)

    def look(self) -> Generation | None:
        """Announce the next generation, if there is to be one."""
        self._read()
        now, members = self._clock.monotonic(), self._generation.members
        alive = [name for name in self._ready if name not in self._lost][: self._most]
        if not set(members) & set(alive):
            # Nobody holds the weights but the checkpoint: they begin together.
            self._first_ready_at = min(self._first_ready_at, now) if alive else inf
            due = len(alive) >= self._wanted or now > self._first_ready_at + START_SECONDS
        else:
            due = alive != members or now > self._failed_at + PATIENCE_SECONDS
        if not due:
            return None
        self._generation = Generation(self._generation.number + 1, alive)
        self._failed_at, self._first_ready_at = inf, inf
        self._store.put(f"{NEWEST}/{self._generation.number}", alive)
        self._store.put(NEWEST, self._generation.number)
        return self._generation

    def _read(self) -> None:
        self._ready += self._store.since(READY, len(self._ready))
        lost = self._store.since(LOST, self._num_lost)
        self._num_lost += len(lost)
        self._lost.update(lost)
        failed = self._store.since(FAILED, self._num_failed)
        self._num_failed += len(failed)
        if any(number == self._generation.number for number, _ in failed):
            self._failed_at = min(self._failed_at, self._clock.monotonic())


class Member:
    """One rank's way from generation to generation."""

    def __init__(self, store: ClusterStore, name: str, clock: Clock = time):
        self._store, self._name, self._clock = store, name, clock
        self._number = -1

    def ready(self) -> None:
        """Ask to be in the next generation."""
        self._store.append(READY, self._name)

    def next(self, given_up: Callable[[], bool] = lambda: False) -> Generation | None:
        """Return the next generation, once this rank and all others of it have arrived; None if it gives up, or the training is over."""
        arrived, began_at = Generation(self._number, []), self._clock.monotonic()
        while not given_up() and not self._store.get(DONE):
            number: int | None = self._store.get(NEWEST)
            newest = Generation(number, self._store.get(f"{NEWEST}/{number}")) if number is not None else arrived
            if newest.number > arrived.number and self._name in newest.members:
                if arrived.members and self._is_entered(arrived, False):
                    return self._entering(arrived)
                # A number, not their names: of many ranks each would ask for each.
                self._store.count(f"{NEWEST}/{number}/arrived")
                arrived = newest
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
        self._number = generation.number
        return generation

    def done(self) -> None:
        """Tell that the training is over, whoever is lost from here on."""
        self._store.put(DONE, True)

    def failed(self) -> None:
        """Tell that a collective of this generation has failed."""
        self._store.append(FAILED, [self._number, self._name])

    def is_outdated(self) -> bool:
        """Return whether a newer generation is announced."""
        newest: int = self._store.get(NEWEST)
        return newest > self._number
