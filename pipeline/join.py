"""The join command: lend this machine to a leader's jobs, and exit with the leader's exit code."""

import logging
import os
import socket

from pipeline import prepare
from pipeline.cluster import store
from pipeline.cluster.messages import JobOffer
from pipeline.cluster.readiness import Readiness
from pipeline.cluster.signals import on_stop_request
from pipeline.cluster.worker import RunRanks, Worker
from pipeline.config import Config, PeerError
from pipeline.files import Paths
from pipeline.hardware import machine
from pipeline.hardware.network import endpoint, interface, own_address, split, wait_for_port
from pipeline.job import Job
from pipeline.launch import supervisor
from pipeline.launch.failures import LaunchResult
from pipeline.launch.node import Node
from pipeline.launch.supervisor import Observer
from pipeline.runs.status import STOPPED, StopRequested
from pipeline.stop_signals import StopRequest, handled_by

log = logging.getLogger(__name__)

MODULES = {"train": "pipeline.training.train_rank", "evaluate": "pipeline.training.evaluate_rank"}
ELASTIC = "pipeline.elastic.train_rank"
# How long a worker waits for its leader to begin.
LEADER_SECONDS = 600


def run(config: Config, paths: Paths, leader: str) -> int:
    """Take part in every job of a leader; returns its exit code."""
    machine.check_writable(paths.root)
    host, port = split(leader)
    worker: Worker | None = None

    def stop() -> None:
        if worker is None:
            raise StopRequested(f"stopped on request while it waited for the leader {leader}")
        worker.stop()

    with on_stop_request(stop):
        log.info("joining the leader at %s", leader)
        waiting = "waiting for it, for %d s at most (%s)"
        address = wait_for_port(host, port, LEADER_SECONDS, lambda why: log.info(waiting, LEADER_SECONDS, why))
        # A container that was started again has the same name, and takes its old place.
        name = f"{socket.gethostname()}/{os.getpid()}"
        worker = Worker(name, address, store.connect(host, port), Readiness(paths, prepare.run).check, _runner(host, port, name))
        log.info("joined %s", leader)
        try:
            verdict = worker.work()
        except PeerError:
            if worker.stopped:
                return STOPPED
            raise
    # A restart policy is for workers that die: after the leader's end there is nothing to come back to.
    return 0 if os.environ.get("LOCKSTEP_RESTART", "no") != "no" else verdict


def _runner(host: str, port: int, name: str) -> RunRanks:
    """Return the function that runs this machine's ranks of a job, which meet the others at the leader's store."""

    def run_ranks(offer: JobOffer, job: Job, observer: Observer) -> LaunchResult:
        dist, address = offer.config.dist, own_address(host, port)
        node = Node(
            ranks=dist.world_size // dist.nodes,
            threads=dist.threads_per_rank,
            # The leader is another one, also where the job may have begun without others.
            nodes=max(dist.nodes, 2),
            name=name if offer.elastic else "",
            leads=False,
            job_id=offer.id,
            endpoint=endpoint(host, port),
            address=address,
            interface=interface(address) or "lo",
        )
        stop = StopRequest()
        with handled_by(stop.on_signal):
            return supervisor.run(ELASTIC if offer.elastic else MODULES[offer.stage], job, node, None, observer, stop)

    return run_ranks
