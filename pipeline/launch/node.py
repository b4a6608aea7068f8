"""This machine's part in a job: how many ranks it runs, and where they meet the others."""

import uuid
from dataclasses import dataclass, field

from pipeline.job import Job
from pipeline.launch.failures import Failure


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
    # CUDA_VISIBLE_DEVICES of its ranks, where it is not this process's.
    gpus: str | None = None
    # Its name, where machines come and go.
    name: str = ""

    @classmethod
    def alone(cls, job: Job, gpus: str | None = None) -> "Node":
        """One machine that runs all ranks of a job."""
        return cls(job.config.dist.world_size, job.config.dist.threads_per_rank, gpus=gpus)


class Membership:
    """The machines of one job, as the one that leads it sees them; on one machine nobody else is there."""

    # True once another machine of the job was told to stop.
    leaving = False

    def __init__(self, node: Node):
        self.node = node

    def failures_since_last_call(self) -> list[Failure]:
        """Return the failures that other machines have reported since the last call."""
        return []

    def end_job(self, exit_code: int) -> None:
        """Tell the other machines that the job is over."""
