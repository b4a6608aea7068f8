"""The join command: lend this machine to a leader's jobs, and exit with the leader's exit code."""

from pipeline import prepare
from pipeline.cluster.worker import Worker
from pipeline.config import Config, PeerError
from pipeline.files import Paths
from pipeline.hardware import machine
from pipeline.hardware.network import split
from pipeline.runs.status import STOPPED


def run(config: Config, paths: Paths, leader: str) -> int:
    """Take part in every job of a leader; returns its verdict."""
    machine.check_writable(paths.root)
    worker = Worker(paths, *split(leader), prepare.run)
    try:
        return worker.work()
    except PeerError:
        if worker.stopped:
            return STOPPED
        raise
