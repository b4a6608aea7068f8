"""A stage below `lead`: offers its job to the workers, or only says how it ended where there are none."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

from pipeline.cluster.membership import MultiNode, Size
from pipeline.cluster.messages import LEADER, JobOffer, Reply
from pipeline.cluster.presence import LOOK_SECONDS, Presence
from pipeline.cluster.readiness import bitwise_requirements, gpus_of_ranks
from pipeline.cluster.signals import on_stop_request
from pipeline.cluster.store import connect
from pipeline.config import Config, PeerError
from pipeline.hardware.network import endpoint, interface, own_address, split
from pipeline.job import Job
from pipeline.launch.node import Membership, Node
from pipeline.process_tree import SIZE, STOP_FILE, STORE
from pipeline.runs.status import STOPPED, StopRequested

# Long enough for two heartbeats of a worker, which has just been told the end of a job.
PRESENCE_SECONDS = 5


def lead_job(stage: Literal["train", "evaluate"], job: Job, say: Callable[[str], None], requested: Callable[[], bool]) -> Membership:
    """Return the membership of a job once all its machines are there; StopRequested if a signal comes first."""
    host, port = split(os.environ[STORE])
    dist = job.config.dist

    def check() -> None:
        if requested() or (STOP_FILE in os.environ and Path(os.environ[STOP_FILE]).exists()):
            raise StopRequested("stopped on request before it began")

    check()
    size = Size.read(os.environ.get(SIZE))
    elastic = stage == "train" and job.elastic
    # Where machines come and go there may be others later.
    machines = max(dist.nodes, size.most) if elastic else dist.nodes
    if machines == 1:
        return LedSingleNode(job, host, port)
    name = LEADER if elastic else ""
    node = Node(dist.world_size // dist.nodes, dist.threads_per_rank, machines, endpoint=endpoint(host, port), name=name)
    offer = _offer(stage, job, node)

    def stop() -> NoReturn:
        raise StopRequested("stopped on request while it waited for workers")

    with on_stop_request(stop):
        # What came before these signals were handled here.
        check()
        members = MultiNode(node, offer, connect(host, port), say, size=size)
        try:
            # Bound to one address, the store is at no other.
            members.wait_for_workers(endpoint(socket.gethostname() if host == "127.0.0.1" else host, port))
        except StopRequested:
            members.end_job(STOPPED)
            raise
    address = _own_address(members.replies)
    members.node = replace(node, address=address, interface=interface(address) or "lo")
    return members


def on_those_that_are_there(config: Config, say: Callable[[str], None]) -> Config:
    """Return a configuration without the machines that an elastic training has gone on without: nobody waits for them."""
    store = connect(*split(os.environ[STORE]))
    if not store.get("num-offers"):
        # Nothing was trained yet: workers may be about to come.
        return config
    dist, presence, until = config.dist, Presence(store), time.monotonic() + PRESENCE_SECONDS
    while (nodes := 1 + len(presence.workers())) < dist.nodes and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    if nodes >= dist.nodes:
        return config
    say(f"{nodes} of {dist.nodes} machines are there; the others are not waited for")
    size = {"nodes": nodes, "world_size": dist.world_size // dist.nodes * nodes, "lanes_per_rank": None}
    return config.model_copy(update={"dist": dist.model_copy(update=size)})


def _offer(stage: Literal["train", "evaluate"], job: Job, node: Node) -> JobOffer:
    return JobOffer(
        id=node.job_id,
        stage=stage,
        run=job.run.name,
        config=job.config,
        device=job.device,
        backend=job.backend,
        precision=job.precision,
        bitwise_requirements=bitwise_requirements(job),
        gpus=gpus_of_ranks(job.backend, node.ranks),
        until=job.until,
        elastic=bool(node.name),
    )


def _own_address(replies: list[Reply]) -> str:
    """Return this machine's address that the workers reached, not the loopback's where one of them is another machine."""
    ours = [one.leader.removeprefix("::ffff:") for one in replies if interface(one.leader)]
    outward = [address for address in ours if interface(address) != "lo"]
    if not outward and not ours:
        # Nobody has come yet; a machine without a network has its loopback.
        with contextlib.suppress(OSError):
            outward = [own_address("8.8.8.8", 53)]
    return (outward or ours or ["127.0.0.1"])[0]


class LedSingleNode(Membership):
    """The membership of a job on one machine below `lead`, which learns the ranks' exit code: DVC makes 255 of all of them."""

    def __init__(self, job: Job, host: str, port: int):
        super().__init__(Node.alone(job))
        self._host, self._port, self._job_ended = host, port, False

    def end_job(self, exit_code: int) -> None:
        """Tell `lead`; only the first call counts."""
        if not self._job_ended:
            with contextlib.suppress(PeerError):
                connect(self._host, self._port).put("last-exit-code", exit_code)
        self._job_ended = True
