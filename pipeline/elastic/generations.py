"""Who makes up the group: a coordinator announces one generation of ranks after the other, and ranks come to the newest.

A rank is ready once its model and data are there and its kernels are warm. A generation begins when all its ranks have arrived at it;
a newer one is announced when one of them is lost, or a further one is ready, and ranks that have not begun may all go on to that.

A machine's agent tells which of its ranks have ended. Of a machine that is lost itself nobody tells: if ranks wait, and its agent's
heartbeat does not change, or is another agent's by now, its ranks are left out; those that live after all ask to be in again.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeline.cluster.messages import LEADER, Clock
from pipeline.cluster.store import ClusterStore

# The variable with the address of the store.
STORE = "LOCKSTEP_GENERATIONS"
# The variables that tell the ranks of one machine from another's, and one that was started again from the one before.
MACHINE, INCARNATION = "LOCKSTEP_MACHINE", "LOCKSTEP_INCARNATION"
# gloo asks for addresses together, and waits for them as long as the store is told; it is itself told a shorter time.
ADDRESSES_TOGETHER = {"GLOO_ENABLE_STORE_V2_API": "1"}
# Lists in the store: ranks that are ready, and ranks that have ended or leave.
READY, LOST = "ready", "lost"
# Values there: the newest generation, the newest that leaves a silent machine out, whether the training is over.
NEWEST, SILENT, DONE = "generation", "silent", "done"
# An agent's heartbeat changes so often.
HEARTBEAT_SECONDS = 0.25
LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.005, 0.25
# A rank that has failed to enter so many generations in a row ends: after some five minutes, where each takes 3 s.
MOST_IN_VAIN = 100


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


class Member:
    """One rank's way from generation to generation."""

    def __init__(self, store: ClusterStore, name: str, clock: Clock = time):
        self._store, self._name, self._clock = store, name, clock
        self._generation = self._newest_known = Generation(-1, [])

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
            newest = self._newest()
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

    def _newest(self) -> Generation:
        """The newest generation; its ranks, which may be many, are asked for once."""
        number: int | None = self._store.get(NEWEST)
        if number is not None and number != self._newest_known.number:
            self._newest_known = Generation(number, self._store.get(f"{NEWEST}/{number}"))
        return self._newest_known

    def formed(self) -> None:
        """Tell that the group of this generation has formed."""
        self._store.put(f"{NEWEST}/{self._generation.number}/formed", True)

    def done(self) -> None:
        """Tell that the training is over, whoever is lost from here on."""
        self._store.put(DONE, True)

    def failed(self) -> None:
        """Tell that a collective of this generation has failed."""
        self._store.count(f"{NEWEST}/{self._generation.number}/failed")

    def is_outdated(self) -> bool:
        """Return whether a newer generation is known of."""
        return self._newest_known.number > self._generation.number

    def waits_in_vain(self) -> tuple[int, bool] | None:
        """Look for a newer generation: return this one's number if that leaves ranks out, and whether because their machine is silent."""
        own, newest = self._generation, self._newest()
        if newest.number <= own.number or set(own.members) <= set(newest.members):
            return None
        silent: int | None = self._store.get(SILENT)
        is_silent = silent is not None and silent > own.number
        # Who leaves on request is waited for; who is lost lets the collectives of some fail.
        return (own.number, is_silent) if is_silent or self._store.get(f"{NEWEST}/{own.number}/failed") else None


def lost(store: ClusterStore, name: str) -> None:
    """Tell that a rank has ended, or leaves."""
    store.append(LOST, name)
