"""How many machines are there: what a job whose size is a range begins with, and begins again with after a loss."""

import time
from collections import Counter
from collections.abc import Callable
from math import inf

from pipeline.cluster.membership import COME_SECONDS, SILENT_SECONDS
from pipeline.cluster.messages import Clock
from pipeline.cluster.store import ClusterStore
from pipeline.config import PeerError

# How long a job that has machines enough waits for the next one; as long as torchrun does.
SETTLE_SECONDS = 30
LOOK_SECONDS = 0.5


class Presence:
    """The workers at a leader's store whose heartbeat changes."""

    def __init__(self, store: ClusterStore, clock: Clock = time):
        self._store, self._clock = store, clock
        # The heartbeat of each, and when it was seen to change.
        self._heartbeats: dict[str, tuple[float, float]] = {}

    def workers(self) -> set[str]:
        """Return who is there; somebody new only from the second heartbeat on, as the first may be an old one."""
        now, found = self._clock.monotonic(), set[str]()
        there = Counter(self._store.since("workers", 0)) - Counter(self._store.since("goodbyes", 0))
        for name in there:
            heartbeat: float = self._store.get(f"heartbeats/{name}") or 0.0
            before, changed_at = self._heartbeats.get(name, (heartbeat, -inf))
            self._heartbeats[name] = (heartbeat, now if heartbeat != before else changed_at)
            if now - self._heartbeats[name][1] < SILENT_SECONDS:
                found.add(name)
        return found

    def wait_for(self, least: int, most: int, check: Callable[[], None], say: Callable[[str], None]) -> int:
        """Return how many machines a job begins with, this one counted: all it takes, or enough and none came for a while."""
        began_at = changed_at = self._clock.monotonic()
        before, announced = set[str](), False
        while True:
            check()
            now, there = self._clock.monotonic(), self.workers()
            nodes = 1 + len(there)
            if there - before:
                changed_at = now
            before = there
            if nodes >= most or (nodes >= least and now - changed_at > SETTLE_SECONDS):
                return min(nodes, most)
            if nodes < least and now - began_at > COME_SECONDS:
                raise PeerError(f"{nodes} of at least {least} machines came in {COME_SECONDS} s; start more, or allow fewer")
            if not announced and now - began_at > 1:
                say(f"waiting for {least} to {most} machines, and for {SETTLE_SECONDS} s after the last one")
                announced = True
            self._clock.sleep(LOOK_SECONDS)
