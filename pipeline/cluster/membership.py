"""The machines of one job: the leader calls, workers answer, and each hears how the others fare."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pipeline.cluster.store import ClusterStore
from pipeline.config import Config, MachineError, PeerError, digest
from pipeline.data import store
from pipeline.hardware import machine
from pipeline.hardware.network import interface, own_address, split
from pipeline.job import Job
from pipeline.launch.failures import Failure
from pipeline.launch.node import STORE, Node
from pipeline.runs.identity import versions
from pipeline.runs.source import EVALUATE, TRAIN, source_digests

# How long a leader waits for the workers of a job.
COME_SECONDS = 600
# A worker that has been silent for so long is lost: as long as torchrun's own agents.
SILENT_SECONDS = 15
# torchrun compares the times of two machines' clocks.
CLOCK_SECONDS = 5


class Call(BaseModel):
    """What a leader tells workers of a job: all but where their files are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    stage: Literal["train", "evaluate"]
    run: str
    config: Config
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    precision: Literal["fp32", "bf16"]
    bitwise_requirements: dict[str, str]


class Answer(BaseModel):
    """What a worker says to a call: by which address it knows the leader, or why it cannot take part."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: str
    host: str
    leader: str
    clock: float
    complaint: str | None


def bitwise_requirements(job: Job) -> dict[str, str]:
    """What must be equal on all machines of a job, or their bits differ."""
    here = machine.detect()
    kind = here.gpus[0] if job.device == "cuda" and here.gpus else here.cpu
    computes = versions(job.config, job.device, job.backend)
    code = digest(source_digests(job.config, TRAIN, EVALUATE))
    return computes | {"code": code, "device": kind, "data": store.read_manifest(job.prepared).digest}


class MultiNode:
    """The machines of a job, as its leader sees them: exactly as many workers are admitted as it needs, the others are spare."""

    def __init__(self, stage: Literal["train", "evaluate"], job: Job, say: Callable[[str], None]):
        host, port = split(os.environ[STORE])
        self._meeting, self._say = ClusterStore(host, port), say
        self._wanted, dist = job.config.dist.nodes - 1, job.config.dist
        node = Node(dist.world_size // dist.nodes, dist.threads_per_rank, dist.nodes, endpoint=f"{host}:{port}")
        self._id, self._answers, self._failures, self._job_ended = node.job_id, list[Answer](), 0, False
        self._admitted: list[str] = []
        # The last beat of every worker, and when it was new.
        self._beats: dict[str, tuple[int, float]] = {}
        self._reviewed_at, self.leaving = 0.0, False
        call = Call(
            id=self._id,
            stage=stage,
            run=job.run.name,
            config=job.config,
            device=job.device,
            backend=job.backend,
            precision=job.precision,
            bitwise_requirements=bitwise_requirements(job),
        )
        self._meeting.append("calls", call.model_dump())
        self._gather(port)
        address = self._address()
        self.node = replace(node, address=address, interface=interface(address) or "lo")

    def _gather(self, port: int) -> None:
        """Wait until enough workers have answered."""
        until, told = time.monotonic() + COME_SECONDS, -1
        while True:
            for answer in self._new_answers():
                if answer.complaint:
                    self.end_job(MachineError.exit_code)
                    raise MachineError(f"worker {answer.host}: {answer.complaint}")
            self._review()
            missing = self._wanted - len(self._admitted)
            if missing <= 0:
                return
            if told != missing and time.monotonic() > until - COME_SECONDS + 1:
                self._say(f"waiting for {missing} of {self._wanted} workers: python -m pipeline join {socket.gethostname()}:{port}")
                told = missing
            if time.monotonic() > until:
                self.end_job(PeerError.exit_code)
                raise PeerError(f"{missing} of {self._wanted} workers did not come in {COME_SECONDS} s; start them, or lead fewer")
            time.sleep(0.1)

    def _new_answers(self) -> list[Answer]:
        """Answers since the last time; one whose clock is off gets a complaint, as torchrun would take that machine for dead."""
        found: list[Answer] = []
        for value in self._meeting.since(f"{self._id}/answers", len(self._answers)):
            answer = Answer.model_validate(value)
            off_seconds = answer.clock - time.time()
            self._answers.append(answer)
            if abs(off_seconds) > CLOCK_SECONDS and not answer.complaint:
                answer = answer.model_copy(update={"complaint": f"its clock is {off_seconds:.0f} s off; set both clocks, such as by NTP"})
            if not answer.complaint:
                self._beats[answer.worker] = (-1, time.monotonic())
            found.append(answer)
        return found

    def _review(self) -> None:
        """Let go of workers that are silent, and admit others in their place."""
        now = time.monotonic()
        for worker, (beat, _) in self._beats.items():
            newest: int | None = self._meeting.get(f"{self._id}/beats/{worker}")
            if newest is not None and newest != beat:
                self._beats[worker] = (newest, now)
        alive = [worker for worker, (_, at) in self._beats.items() if now - at < SILENT_SECONDS]
        crew = [worker for worker in self._admitted if worker in alive]
        crew += [worker for worker in alive if worker not in crew][: self._wanted - len(crew)]
        if crew != self._admitted:
            self._admitted = crew
            self._meeting.put(f"{self._id}/crew", crew)

    def _address(self) -> str:
        """The address of ours that the workers reach; not the loopback's where one of them comes from outside."""
        known = [one.leader.removeprefix("::ffff:") for one in self._answers if interface(one.leader)]
        outward = [address for address in known if interface(address) != "lo"]
        return (outward or known or [own_address("8.8.8.8", 53)])[0]

    def heard(self) -> list[Failure]:
        """What workers have told of failures since the last time; now and then, who is still there."""
        try:
            new = self._meeting.since(f"{self._id}/failures", self._failures)
            if time.monotonic() - self._reviewed_at > 1:
                self._reviewed_at = time.monotonic()
                for answer in self._new_answers():
                    if answer.complaint:
                        self._say(f"worker {answer.host} cannot take part: {answer.complaint}")
                self._review()
                self.leaving = self._meeting.get(f"{self._id}/leaving") is not None
        except PeerError:
            # Without `lead` above us this job is about to be stopped.
            return []
        self._failures += len(new)
        return [Failure(**one) for one in new]

    def end_job(self, exit_code: int) -> None:
        """Tell the workers that the job is over, and how; once."""
        if self._job_ended:
            return
        self._job_ended = True
        with contextlib.suppress(PeerError):
            self._meeting.put(f"{self._id}/over", exit_code)
            self._meeting.put("last", exit_code)
