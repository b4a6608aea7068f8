"""A simulated job: `lead`, its stages and its workers by their own code, torchrun as a model, faults, and what must hold all the time."""

import json
import signal
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from pipeline import lead
from pipeline.cluster.membership import MultiNode
from pipeline.cluster.messages import JobOffer
from pipeline.cluster.store import ClusterStore
from pipeline.cluster.worker import Worker
from pipeline.config import Config, MachineError, PeerError
from pipeline.job import Job
from pipeline.launch.failures import LaunchResult
from pipeline.launch.node import Node
from pipeline.runs.status import STOPPED, StopRequested
from tests.kit.experiment import settings
from tests.kit.machine_faults import FAULTS
from tests.kit.simulation import QUANTUM_SECONDS, Process, SimulatedClock, SimulatedServer, SimulatedStore, World

# How long the ranks of a job compute.
WORK_SECONDS = 12
RETURN_SECONDS, REPLACED_SECONDS = 60, 15 + 5


@cache
def offer_of(nodes: int) -> JobOffer:
    config = Config.model_validate(
        settings(dist__world_size=nodes, dist__nodes=nodes, dist__batch_size_per_gpu=12 // nodes, dist__lanes=12)
    )
    values = {"id": "-", "stage": "train", "run": "r", "config": config, "device": "cpu", "backend": "gloo", "precision": "fp32"}
    return JobOffer.model_validate(values | {"bitwise_requirements": {}})


class Ranks:
    """A model of torchrun: the ranks of a job compute while the leader and enough workers are there, and end together."""

    def __init__(self, nodes: int):
        self.nodes, self.agents, self.seconds = nodes, set[Process](), 0.0
        self.done, self.stop_requested = False, False

    def whole(self, now: float) -> bool:
        there = [one for one in self.agents if one.alive and one.wakes_at < now + 5]
        return len(there) >= self.nodes and any(one.name == "stage" for one in there)

    def tick(self, now: float, seconds: float) -> None:
        if not self.done and self.whole(now):
            self.seconds += seconds
            self.done = self.stop_requested or self.seconds >= WORK_SECONDS


class Machines:
    """A world of one leader and some workers, with jobs to do one after the other."""

    def __init__(self, world: World, needed: int, workers: int, num_jobs: int = 2, goes_on: bool = False):
        self.world, self.needed, self.num_jobs, self.goes_on = world, needed, num_jobs, goes_on
        self.server = SimulatedServer(self._on_set)
        self.ranks: dict[str, Ranks] = {}
        self.members: dict[str, list[str]] = {}
        self.workers: list[Process] = []
        self.stage: Process | None = None
        self.stage_codes: list[int | None] = []
        self.faults: list[tuple[float, str, str]] = []
        self.wrong_since: dict[str, float] = {}
        self.signalled: dict[str, float] = {}
        # When a machine that takes part in a running job was told to stop.
        self.stopping_since = float("inf")
        # All that were a member of some job, also for a moment.
        self.ever_members: set[str] = set()
        self.offsets: dict[str, float] = {}
        world.act = self.fault
        self.leader = world.start("leader", self._lead)
        for number in range(workers):
            self.start_worker(f"worker-{number}", 0.1 * number)
        world.start("torchrun", self._tick)

    def _store(self, process: Process) -> ClusterStore:
        return ClusterStore(SimulatedStore(self.server, process), "leader")

    # -- processes

    def _lead(self, process: Process) -> int:
        """What `lead dvc repro` does: run two stages, give the verdict, wait for goodbyes; or `lead sh -c "train; train"`."""
        store, code = self._store(process), 0
        for number in range(self.num_jobs):
            self.stage = self.world.start("stage", partial(self._run_stage, number=number), self.world.now)
            while self.stage.alive:
                process.sleep(QUANTUM_SECONDS)
            self.stage_codes.append(self.stage.result)
            code = 0 if self.stage.result == 0 else 255
            if code and not self.goes_on:
                break
        verdict = lead.verdict_of(code, store)
        store.put("verdict", verdict)
        # `lead` passes on to its stage what it is told.
        relay = SimpleNamespace(hurried=False, requested="stage" in self.signalled)
        lead.wait_for_goodbyes(store, self.needed, 0.0, relay, SimulatedClock(process))  # type: ignore[arg-type]
        self.server.is_open = False
        return verdict

    def _run_stage(self, process: Process, number: int) -> int:
        """What RankStage does with a membership."""
        offer = offer_of(self.needed + 1).model_copy(update={"id": f"job-{number}"})
        self.ranks[offer.id] = Ranks(self.needed + 1)
        node = Node(1, 1, self.needed + 1, job_id=offer.id)

        def stop() -> None:
            raise StopRequested

        process.on_term = stop
        try:
            members = MultiNode(node, offer, self._store(process), lambda text: None, SimulatedClock(process))
        except (PeerError, StopRequested) as error:
            return error.exit_code
        code = PeerError.exit_code
        try:
            members.wait_for_workers("leader")
            process.on_term = lambda: None
            observer = SimpleNamespace(
                poll=members.failures_since_last_call, stop_requested=lambda: members.leaving, is_done=lambda seconds: False
            )
            code = self._run_ranks(process, offer, observer).exit_code
        except StopRequested:
            code = STOPPED
        except (MachineError, PeerError) as error:
            code = error.exit_code
        members.end_job(code)
        return code

    def start_worker(self, name: str, starts_at: float) -> None:
        self.workers.append(self.world.start(name, self._run_worker, starts_at))

    def _run_worker(self, process: Process) -> int:
        def check(offer: JobOffer) -> tuple[Job, str | None]:
            process.sleep(process.check_seconds)
            self.offsets[process.name] = process.clock_offset
            return None, None  # type: ignore[return-value]

        def run_ranks(offer: JobOffer, job: Job, observer: Any) -> LaunchResult:
            return self._run_ranks(process, offer, observer)

        worker = Worker(process.name, "leader", self._store(process), check, run_ranks, SimulatedClock(process))
        process.on_term = worker.stop
        try:
            return worker.work()
        except StopRequested:
            return STOPPED
        except PeerError:
            return STOPPED if worker.stopped else PeerError.exit_code

    def _run_ranks(self, process: Process, offer: JobOffer, observer: Any) -> LaunchResult:
        """What supervisor.run does, with the model of torchrun."""
        ranks, result, leads = self.ranks[offer.id], LaunchResult(), process.name == "stage"
        if process.told_to_stop_in not in (None, offer.id):
            self.world.violations.append(f"{process.name} was told to stop, and takes part in another job")
        whole_at, stops = self.world.now, list[int]()
        before, process.on_term = process.on_term, lambda: stops.append(signal.SIGTERM)
        ranks.agents.add(process)
        try:
            while not ranks.done and not observer.is_done(0.0):
                observer.poll()
                if stops or observer.stop_requested():
                    result.stopped_by, ranks.stop_requested, result.exit_code = signal.SIGTERM, True, STOPPED
                    if not ranks.whole(self.world.now):
                        break
                whole_at = self.world.now if ranks.whole(self.world.now) else whole_at
                if leads and self.world.now - whole_at > RETURN_SECONDS:
                    result.exit_code = PeerError.exit_code
                    break
                process.sleep(QUANTUM_SECONDS)
        finally:
            ranks.agents.discard(process)
            process.on_term = before
        observer.poll()
        if ranks.done and ranks.stop_requested:
            result.exit_code = STOPPED
        result.stopped_by = signal.SIGTERM if stops else result.stopped_by
        return result

    def _tick(self, process: Process) -> None:
        while any(one.alive for one in (self.leader, *self.workers)):
            for ranks in self.ranks.values():
                ranks.tick(self.world.now, QUANTUM_SECONDS)
            self._check_replacement()
            process.sleep(QUANTUM_SECONDS)

    def fault(self, action: tuple[str, int], current: Process) -> None:
        """Do a fault: its kind, and the number of a worker, or -1 for the leader's stage."""
        kind, number = action
        target = self.stage if number < 0 else self.workers[number]
        if target is None or not target.alive:
            return
        self.faults.append((self.world.now, kind, target.name))
        FAULTS[kind](self, target, current)

    # -- what must hold

    @property
    def verdict(self) -> int | None:
        value = self.server.values.get("verdict")
        return None if value is None else int(value)

    def current_job(self) -> str:
        return list(self.ranks)[-1] if self.ranks else ""

    def takes_part(self, process: Process) -> bool:
        """Return whether a process is one of a job that has begun."""
        job = self.current_job()
        if self.stage is None or not self.stage.alive or not job or self.stage not in self.ranks[job].agents:
            return False
        return process is self.stage or process.name in self.members.get(f"{job}/members", [])

    def touched(self, *kinds: str) -> set[str]:
        """Return the processes that had a fault of these kinds, or any."""
        return {name for _, kind, name in self.faults if not kinds or kind in kinds}

    def _check_replacement(self) -> None:
        """A lost member is replaced within 15 s of silence, and what the leader's review, heartbeats and polls take."""
        key = f"job-{len(self.stage_codes)}/members"
        if (
            not self.stage
            or not self.stage.alive
            or "stage" in self.touched()
            or self.touched("pause of all")
            or not self.touched("crash", "crash and return")
        ):
            return
        members, alive = self.members.get(key, []), {one.name for one in self.workers if one.alive}
        spares = alive - self.touched() - set(members)
        wrong = set(members) - alive or (spares if 0 < len(members) < self.needed else set())
        self.wrong_since = {name: self.wrong_since.get(name, self.world.now) for name in wrong}
        for name, since in self.wrong_since.items():
            if self.world.now - since > REPLACED_SECONDS:
                self.world.violations.append(f"{name}: for {self.world.now - since:.0f} s no spare has taken the place of a lost worker")

    def _on_set(self, key: str, value: bytes) -> None:
        if not key.endswith("/members"):
            return
        members = json.loads(value)
        if len(members) > self.needed:
            self.world.violations.append(f"{len(members)} workers admitted, {self.needed} wanted")
        if {kind for _, kind, _ in self.faults} == {"pause of all"} and len(members) < len(self.members.get(key, [])):
            self.world.violations.append("a worker was let go that slept no longer than the leader")
        for name in members:
            if abs(self.offsets.get(name, 0)) > 5 and name not in self.members.get(key, []):
                self.world.violations.append(f"{name} admitted although its clock is off")
        self.members[key] = members
        self.ever_members |= set(members)
