"""The machines of one job as its leader sees them: who may take part, who is alive, what failed."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf

from pipeline.cluster.messages import MEMBERS, Clock, JobOffer, Reply
from pipeline.cluster.store import ClusterStore
from pipeline.config import MachineError, PeerError
from pipeline.launch.failures import Failure
from pipeline.launch.node import Membership, Node

# How long a leader waits for the workers of a job; for those of one that begins with fewer, as they were there a moment ago.
COME_SECONDS, ELASTIC_COME_SECONDS = 600, 60
# A worker without a heartbeat for so long is lost; torchrun's agents use the same limit.
SILENT_SECONDS = 15
# Of one whose ranks may come back, the next one takes the place earlier.
ELASTIC_SILENT_SECONDS = 8
# torchrun compares wall clocks for its keep-alives. A clock is behind if so many heartbeats say so: one may be late.
CLOCK_SECONDS, CLOCK_HEARTBEATS = 5, 3
# Between two looks at the workers the leader itself was stopped, if more time has passed.
OWN_SLEEP_SECONDS = 5
POLL_SECONDS, REVIEW_SECONDS = 0.1, 1


@dataclass(frozen=True)
class Size:
    """How many machines a job needs, and how many it takes, where that may change."""

    least: int
    most: int

    @classmethod
    def read(cls, said: str | None) -> "Size":
        """Read what `lead` tells the commands below it."""
        return cls(*map(int, said.split(":"))) if said else FIXED

    @property
    def varies(self) -> bool:
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


# As many as `lead` has begun with.
FIXED = Size(1, 1)


@dataclass
class WorkerState:
    """What a leader knows of a worker that has accepted its job."""

    host: str
    # Its newest heartbeat, which is its wall clock, and when that was new.
    heartbeat: float
    seen_at: float
    # How far its clock is ahead: a heartbeat may be late, so the largest difference is the nearest to the truth.
    ahead_seconds: float = -inf
    num_heartbeats: int = 0
    # The UUIDs of its GPUs.
    gpus: frozenset[str] = frozenset()

    def see(self, heartbeat: float, monotonic: float, wall: float) -> None:
        """Take note of a new heartbeat."""
        self.heartbeat, self.seen_at = heartbeat, monotonic
        self.ahead_seconds = max(self.ahead_seconds, heartbeat - wall)
        self.num_heartbeats += 1

    @property
    def clock_agrees(self) -> bool:
        return abs(self.ahead_seconds) <= CLOCK_SECONDS

    @property
    def clock_differs(self) -> bool:
        """Return whether the clock is wrong, rather than some heartbeats late."""
        return self.ahead_seconds > CLOCK_SECONDS or (self.ahead_seconds < -CLOCK_SECONDS and self.num_heartbeats >= CLOCK_HEARTBEATS)


class MultiNode(Membership):
    """The membership of a job on several machines: admits exactly as many workers as it needs, the others are spares.

    Of a job whose ranks go on without those of other machines, workers come and go while it runs, and it takes all it has work for.
    """

    def __init__(
        self, node: Node, offer: JobOffer, store: ClusterStore, say: Callable[[str], None], clock: Clock = time, size: Size = FIXED
    ):
        super().__init__(node)
        self._begins_again, self._come_seconds = size.varies, ELASTIC_COME_SECONDS if size.varies else COME_SECONDS
        self.leaving, self.replies = False, list[Reply]()
        self._wanted, self._id, self._gpus = offer.config.dist.nodes - 1, offer.id, frozenset(offer.gpus)
        self._least = self._most = self._wanted
        if offer.elastic:
            dist = offer.config.dist
            # More ranks than lanes have nothing to compute.
            useful = ceil(dist.pieces * dist.nodes / dist.world_size) - 1
            # A job of a fixed size goes on with its leader alone, if it must.
            self._least, self._most = size.least - 1, max(min(size.most - 1, useful), self._wanted)
        self._elastic, self._silent_seconds = offer.elastic, ELASTIC_SILENT_SECONDS if offer.elastic else SILENT_SECONDS
        self._sharing: set[str] = set()
        self._store, self._say, self._clock = store, say, clock
        self._num_failures, self._num_leaving, self._began, self._job_ended = 0, 0, False, False
        self._admitted: list[str] = []
        self._workers: dict[str, WorkerState] = {}
        self._reviewed_at = clock.monotonic()
        store.append("offers", offer.model_dump())
        # Workers ask for it twice a second, and for the offers themselves once.
        store.put("num-offers", len(store.since("offers", 0)))

    def wait_for_workers(self, where: str) -> None:
        """Wait until enough workers have accepted the offer; PeerError if they do not come, MachineError if one cannot take part."""
        started_at, announced = self._clock.monotonic(), -1
        while True:
            refusals = self._review()
            missing = self._wanted - len(self._admitted)
            if missing <= 0:
                self._began = True
                return
            if refusals:
                self.end_job(MachineError.exit_code)
                raise MachineError(f"worker {refusals[0]}")
            waited_seconds = self._clock.monotonic() - started_at
            if announced != missing and waited_seconds > 1:
                self._say(f"waiting for {missing} of {self._wanted} workers: python -m pipeline join {where}")
                announced = missing
            if waited_seconds > self._come_seconds:
                self._store.append("lost", missing)
                self.end_job(PeerError.exit_code)
                shared = f" ({len(self._sharing)} had the GPU of another)" if self._sharing else ""
                came = f"{missing} of {self._wanted} workers did not come in {self._come_seconds} s"
                raise PeerError(f"{came}{shared}; start them, or lead fewer")
            self._clock.sleep(POLL_SECONDS)

    def _review(self) -> list[str]:
        """Drop workers that are silent, and admit others in their place; returns what workers have refused since the last call, and why."""
        now = self._clock.monotonic()
        if now - self._reviewed_at > OWN_SLEEP_SECONDS:
            # This process was stopped too, as by `docker pause` of all machines: what it slept through does not count.
            for state in self._workers.values():
                state.seen_at += now - self._reviewed_at
        self._reviewed_at = now
        self._read_leaving()
        refusals = self._read_replies()
        for worker, state in list(self._workers.items()):
            heartbeat: float | None = self._store.get(f"heartbeats/{worker}")
            if heartbeat is not None and heartbeat != state.heartbeat:
                state.see(heartbeat, self._clock.monotonic(), self._clock.time())
            if worker not in self._admitted and state.clock_differs:
                # torchrun compares wall clocks, and would take this machine for dead.
                refusals.append(f"{state.host}: its clock is {state.ahead_seconds:.0f} s off; set both clocks, such as by NTP")
                del self._workers[worker]
        alive = [worker for worker, state in self._workers.items() if now - state.seen_at < self._silent_seconds]
        members = [worker for worker in self._admitted if worker in alive]
        candidates = [worker for worker in alive if worker not in members and self._workers[worker].clock_agrees]
        for worker in candidates:
            if len(members) < self._most and not self._shares_a_gpu(worker, members):
                members.append(worker)
        if members != self._admitted:
            self._tell(set(self._admitted) - set(members), "is lost", len(members))
            self._tell(set(members) - set(self._admitted), "joins", len(members))
            self._admitted = members
            self._store.put(f"{self._id}/{MEMBERS}", members)
        return refusals

    def _tell(self, workers: set[str], what: str, left: int) -> None:
        """Say what becomes of workers of a job that goes on."""
        for worker in sorted(workers) if self._elastic and self._began else ():
            too_few = f"; {1 + left} of at least {1 + self._least} machines are left"
            self._say(f"machine {worker} {what}{'' if what == 'joins' else too_few if left < self._least else '; the others go on'}")

    def _shares_a_gpu(self, worker: str, members: list[str]) -> bool:
        """Return whether a worker has a GPU of the leader's or of a member's, which nccl does not see in containers, and say so once."""
        state = self._workers[worker]
        used = [("the leader", self._gpus), *((self._workers[one].host, self._workers[one].gpus) for one in members)]
        with_whom = next((host for host, gpus in used if gpus & state.gpus), None)
        if with_whom and worker not in self._sharing:
            self._sharing.add(worker)
            self._say(f"worker {state.host} is left out, as it has a GPU of {with_whom}; give each its own, such as by WORKER_GPUS")
        return with_whom is not None

    def _read_leaving(self) -> None:
        """Forget workers that were told to stop; if one takes part, the whole job is to stop, or goes on without it."""
        names = self._store.since(f"{self._id}/leaving", self._num_leaving)
        self._num_leaving += len(names)
        for name in names:
            self._workers.pop(name, None)
            left = [one for one in self._admitted if one != name]
            if self._elastic and self._began and len(left) >= self._least and left != self._admitted:
                self._tell({name}, "leaves on request", len(left))
                self._admitted = left
                self._store.put(f"{self._id}/{MEMBERS}", left)
            self.leaving |= self._began and name in self._admitted

    def _read_replies(self) -> list[str]:
        refusals: list[str] = []
        for value in self._store.since(f"{self._id}/replies", len(self.replies)):
            reply = Reply.model_validate(value)
            self.replies.append(reply)
            if reply.refusal:
                refusals.append(f"{reply.host}: {reply.refusal}")
                # Also one that took part, and has failed by itself.
                self._workers.pop(reply.worker, None)
            else:
                self._workers[reply.worker] = WorkerState(reply.host, 0.0, self._clock.monotonic(), gpus=frozenset(reply.gpus))
        return refusals

    def failures_since_last_call(self) -> list[Failure]:
        """Return the failures that workers have reported since the last call; once a second, look who is still alive."""
        lost: list[Failure] = []
        try:
            new = self._store.since(f"{self._id}/failures", self._num_failures)
            if self._clock.monotonic() - self._reviewed_at > REVIEW_SECONDS:
                for refusal in self._review():
                    self._say(f"worker {refusal}; it cannot take part")
                lost = self._lost_for_good()
        except PeerError:
            # `lead` above us is gone, and this job is about to be stopped.
            return []
        self._num_failures += len(new)
        return [Failure(**one) for one in new] + lost

    def _lost_for_good(self) -> list[Failure]:
        """Return the failure of a job that is to begin again with fewer machines: one is lost, and no spare is there."""
        if not self._begins_again or not self._began or len(self._admitted) >= self._least:
            return []
        self._begins_again = False
        self._store.append("lost", self._least - len(self._admitted))
        return [Failure(None, PeerError.exit_code, f"{self._least - len(self._admitted)} of the machines that it needs are lost", 0)]

    def end_job(self, exit_code: int) -> None:
        """Tell the workers that the job is over, and how; only the first call counts."""
        if self._job_ended:
            return
        self._job_ended = True
        with contextlib.suppress(PeerError):
            self._store.put(f"{self._id}/exit-code", exit_code)
            self._store.put("last-exit-code", exit_code)
