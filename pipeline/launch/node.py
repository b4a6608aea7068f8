"""This machine's part in a job: how many ranks it runs, and where they meet the others."""

import os
import uuid
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.config import Config, ConfigError
from pipeline.job import Job
from pipeline.launch.failures import Failure

# How the commands below a leader know its store, and the number of machines.
STORE, NODES = "LOCKSTEP_STORE", "LOCKSTEP_NODES"


@dataclass(frozen=True)
class Node:
    """One machine's part in a job."""

    ranks: int
    threads: int
    nodes: int = 1
    leads: bool = True
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    # Port 0: the system chooses a free one.
    endpoint: str = "127.0.0.1:0"
    address: str = "127.0.0.1"
    interface: str = "lo"


class Membership(Protocol):
    """The machines of one job, as the one that leads it sees them."""

    node: Node
    # True once another machine of the job was told to stop.
    leaving: bool

    def failures_since_last_call(self) -> list[Failure]:
        """Return the failures that other machines have reported since the last call."""
        ...

    def end_job(self, exit_code: int) -> None:
        """Tell the other machines that the job is over."""
        ...


class SingleNode:
    """The membership of a job on one machine."""

    leaving = False

    def __init__(self, job: Job):
        self.node = Node(job.config.dist.world_size, job.config.dist.threads_per_rank)

    def failures_since_last_call(self) -> list[Failure]:
        """Nobody else is there."""
        return []

    def end_job(self, exit_code: int) -> None:
        """Nobody is waiting."""


def resolve_num_nodes(config: Config) -> Config:
    """The configuration over as many machines as a leader gives, or as `dist.nodes` asks for."""
    led = os.environ.get(STORE)
    nodes = int(os.environ[NODES]) if led else config.dist.nodes
    size = config.dist.world_size
    if nodes > 1 and not led:
        how = "start this with: python -m pipeline lead dvc repro, and on the others: python -m pipeline join HOST"
        raise ConfigError(f"dist.nodes: {nodes} machines need a leader; {how}; or set nodes: 1")
    if size % nodes:
        raise ConfigError(f"dist.world_size: {size} ranks cannot be spread evenly over {nodes} machines; set it to a multiple of {nodes}")
    return config.model_copy(update={"dist": config.dist.model_copy(update={"nodes": nodes})})
