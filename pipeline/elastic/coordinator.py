"""The one that announces generations: on the leader, beside its machine's agent."""

import logging
import time
from collections.abc import Callable
from math import inf
from typing import Any

from pipeline.cluster.messages import LEADER, MEMBERS, Clock
from pipeline.cluster.store import ClusterStore
from pipeline.elastic.generations import (
    LOST,
    NEWEST,
    READY,
    SILENT,
    Generation,
    agent_of,
    heartbeat_of,
    machine_of,
)

log = logging.getLogger(__name__)

# A failed collective mostly has a lost rank as its cause, which its agent has yet to tell.
PATIENCE_SECONDS = 1.0
# How long ranks are waited for, of which none holds the weights.
START_SECONDS = 30.0
# How long a machine is left out with which a group did not form, at first; each time twice as long.
UNREACHABLE_SECONDS = 5.0


class Coordinator:
    """Announces generations; it outlives all ranks, and there is one for a job, on the leader."""

    def __init__(self, store: ClusterStore, wanted: int, most: int, clock: Clock = time, say: Callable[[str], None] = log.warning):
        self._store, self._wanted, self._most, self._clock, self._say = store, wanted, most, clock, say
        # Who is ready and not lost, in the order in which they came.
        self._ready: list[str] = []
        self._lost: set[str] = set()
        self._num_ready, self._num_lost = 0, 0
        self._generation = Generation(-1, [])
        self._first_ready_at = inf
        # Since when ranks wait for one that does not come or has failed, and every machine's heartbeat then.
        self._waiting_since, self._heartbeats = inf, dict[str, Any]()
        self._failed, self._silent = False, False
        # The newest generation whose group has formed; of machines with which none did, how long and until when they are left out.
        self._formed = Generation(-1, [])
        self._left_out: dict[str, tuple[float, float]] = {}

    def look(self) -> Generation | None:
        """Announce the next generation, if there is to be one."""
        now, members = self._clock.monotonic(), self._generation.members
        self._read(now)
        waits_long = now > self._waiting_since + PATIENCE_SECONDS
        if waits_long:
            heard = {one: self._store.get(heartbeat_of(one)) for one in self._heartbeats}
            living = {(one, heartbeat[0]) for one, heartbeat in heard.items() if heartbeat != self._heartbeats[one]}
            self._keep(lambda name: machine_of(name) not in heard or (machine_of(name), agent_of(name)) in living)
            if self._failed:
                self._leave_out_unreachable(now)
        alive = self._alive(now)
        if not set(members) & set(alive) and not alive:
            self._first_ready_at = inf
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

    def _leave_out_unreachable(self, now: float) -> None:
        """Leave out the machine that came last, if no group has formed with it though all are there: the network may not let it."""
        known = {LEADER, *map(machine_of, self._formed.members)}
        for machine in [machine_of(name) for name in self._generation.members if machine_of(name) not in known][-1:]:
            seconds = 2 * self._left_out[machine][0] if machine in self._left_out else UNREACHABLE_SECONDS
            self._left_out[machine] = seconds, now + seconds
            self._say(
                f"machine {machine} is left out for {seconds:.0f} s, as no group forms with it; see that all machines reach each other"
            )

    def _alive(self, now: float) -> list[str]:
        """The members of the next generation: those that were ready first, one of the leader's machine among them, and those in front."""
        ready = [name for name in self._ready if self._left_out.get(machine_of(name), (0, -inf))[1] < now]
        first = [name for name in ready if machine_of(name) == LEADER][:1]
        found = first + [name for name in ready if name not in first]
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
            workers = {LEADER, *(self._store.get(MEMBERS) or ())}
            self._keep(lambda name: machine_of(name) in workers)
        members, where = self._generation.members, f"{NEWEST}/{self._generation.number}"
        self._failed = bool(self._store.get(f"{where}/failed"))
        if self._formed != self._generation and self._store.get(f"{where}/formed"):
            self._formed = self._generation
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
