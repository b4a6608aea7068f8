"""The machines of one job: the leader calls, workers answer, and each hears how the others fare."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pipeline.config import Config, ConfigError, MachineError, PeerError
from pipeline.data import store
from pipeline.job import Job
from pipeline.launch import machine
from pipeline.launch.fingerprint import source_digest, versions
from pipeline.launch.meeting import MEETING, NODES, Meeting
from pipeline.launch.network import interface, own_address, split
from pipeline.launch.torchrun import Failure, Node

# How long a leader waits for the workers of a job.
COME_SECONDS = 600


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
    likeness: dict[str, str]


class Answer(BaseModel):
    """What a worker says to a call: by which address it knows the leader, or why it cannot take part."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    leader: str
    complaint: str | None


def spread(config: Config) -> Config:
    """The configuration over as many machines as a leader gives, or as `dist.nodes` asks for."""
    led = os.environ.get(MEETING)
    nodes = int(os.environ[NODES]) if led else config.dist.nodes
    size = config.dist.world_size
    if nodes > 1 and not led:
        how = "start this with: python -m pipeline lead dvc repro, and on the others: python -m pipeline join HOST"
        raise ConfigError(f"dist.nodes: {nodes} machines need a leader; {how}; or set nodes: 1")
    if size % nodes:
        raise ConfigError(f"dist.world_size: {size} ranks cannot be spread evenly over {nodes} machines; set it to a multiple of {nodes}")
    return config.model_copy(update={"dist": config.dist.model_copy(update={"nodes": nodes})})


def likeness(job: Job) -> dict[str, str]:
    """What must be equal on all machines of a job, or their bits differ."""
    here = machine.look()
    kind = here.gpus[0] if job.device == "cuda" and here.gpus else here.cpu
    return versions() | {"code": source_digest(), "device": kind, "data": store.read_manifest(job.prepared).digest}


class Alone:
    """The crew of a job on one machine."""

    def __init__(self, job: Job):
        self.node = Node(job.config.dist.world_size, job.config.dist.threads_per_rank)

    def heard(self) -> list[Failure]:
        """Nobody else is there."""
        return []

    def dismiss(self, exit_code: int) -> None:
        """Nobody is waiting."""


class Crew:
    """The machines of a job, as its leader sees them."""

    def __init__(self, stage: Literal["train", "evaluate"], job: Job, say: Callable[[str], None]):
        host, port = split(os.environ[MEETING])
        self._meeting = Meeting(host, port)
        self._heard, self._nodes, dist = 0, job.config.dist.nodes, job.config.dist
        node = Node(dist.world_size // dist.nodes, dist.threads_per_rank, dist.nodes, endpoint=f"{host}:{port}")
        self._id = node.job_id
        call = Call(
            id=self._id,
            stage=stage,
            run=job.run.name,
            config=job.config,
            device=job.device,
            backend=job.backend,
            precision=job.precision,
            likeness=likeness(job),
        )
        self._meeting.append("calls", call.model_dump())
        address = self._address(self._gather(say, port))
        self.node = replace(node, address=address, interface=interface(address) or "lo")

    def _gather(self, say: Callable[[str], None], port: int) -> list[Answer]:
        """Wait until enough workers have answered."""
        until, told = time.monotonic() + COME_SECONDS, -1
        while True:
            answers = [Answer.model_validate(one) for one in self._meeting.since(f"{self._id}/answers", 0)]
            for answer in answers:
                if answer.complaint:
                    self.dismiss(MachineError.exit_code)
                    raise MachineError(f"worker {answer.host}: {answer.complaint}")
            missing = self._nodes - 1 - len(answers)
            if missing <= 0:
                return answers
            if told != missing and time.monotonic() > until - COME_SECONDS + 1:
                say(f"waiting for {missing} of {self._nodes - 1} workers: python -m pipeline join {socket.gethostname()}:{port}")
                told = missing
            if time.monotonic() > until:
                self.dismiss(PeerError.exit_code)
                raise PeerError(f"{missing} of {self._nodes - 1} workers did not come in {COME_SECONDS} s; start them, or lead fewer")
            time.sleep(0.1)

    def _address(self, answers: list[Answer]) -> str:
        """The address of ours that the workers reach; not the loopback's where one of them comes from outside."""
        known = [one.leader.removeprefix("::ffff:") for one in answers if interface(one.leader)]
        outward = [address for address in known if interface(address) != "lo"]
        return (outward or known or [own_address("8.8.8.8", 53)])[0]

    def heard(self) -> list[Failure]:
        """What workers have told of failures since the last time."""
        try:
            new = self._meeting.since(f"{self._id}/failures", self._heard)
        except PeerError:
            # Without `lead` above us this job is about to be stopped.
            return []
        self._heard += len(new)
        return [Failure(**one) for one in new]

    def dismiss(self, exit_code: int) -> None:
        """Tell the workers that the job is over, and how."""
        self._meeting.put(f"{self._id}/over", exit_code)
        self._meeting.put("last", exit_code)


def gather(stage: Literal["train", "evaluate"], job: Job, say: Callable[[str], None]) -> Alone | Crew:
    """The machines of a job, ready to begin."""
    return Crew(stage, job, say) if job.config.dist.nodes > 1 else Alone(job)
