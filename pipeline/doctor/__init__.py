"""The doctor command: checks this machine for what would make a run fail, and prints a fix for each problem, in under five seconds."""

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from pipeline.config import Config, MachineError
from pipeline.doctor import folders, hardware, mlflow, network, programs, storage
from pipeline.doctor.finding import Finding, Kind, in_background
from pipeline.files import Paths
from pipeline.hardware.cgroup import memory_limit
from pipeline.hardware.machine import detect
from pipeline.hardware.network import PORT, split
from pipeline.hardware.placement import a_gpu_each, as_many_ranks
from pipeline.tracking.mirror_process import tracking_uri

LIMIT_SECONDS = 3.5
Checks = dict[str, Callable[[], list[Finding]]]
# Which checks may not answer in time although nothing is broken: how bad that is, and what to do.
SLOW: dict[str, tuple[Kind, str]] = {
    "GPUs": ("wrong", "see that nvidia-smi answers; a driver that takes seconds to load is kept loaded by nvidia-smi -pm 1"),
    "Docker Compose": ("note", "see that docker compose version answers; only runs in containers need it"),
}


def run(config: Config, paths: Paths, leader: str | None = None, port: int | None = None) -> int:
    """Run all checks at once and print what each of them found; returns 4 if anything is wrong."""
    checks = checks_of(config, paths, leader, port or PORT)
    deadline = time.monotonic() + LIMIT_SECONDS
    wrong = False
    for name, result in [(name, in_background(check)) for name, check in checks.items()]:
        try:
            findings = result.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            kind, fix = SLOW.get(name, ("wrong", ""))
            findings = [Finding(kind, f"{name}: no answer in time", fix)]
        except (OSError, ValueError, MachineError) as error:
            findings = [Finding("wrong", f"{name}: {error}")]
        for finding in findings:
            sys.stdout.write(f"{finding}\n")
            wrong |= finding.kind == "wrong"
    return MachineError.exit_code if wrong else 0


def checks_of(config: Config, paths: Paths, leader: str | None, number: int) -> Checks:
    """Every check, by the name that it has where it does not answer."""
    machine, per_node = in_background(detect), os.environ.get("PET_NPROC_PER_NODE", "")

    def memory() -> list[Finding]:
        ranks, device = config, "cpu"
        # Where the driver does not work or answer, the check of GPUs says so.
        with suppress(MachineError, TimeoutError):
            here = machine.result(LIMIT_SECONDS / 2)
            ranks, device = a_gpu_each(as_many_ranks(config, here, per_node), here), "cuda" if here.gpus else "cpu"
        return hardware.memory(ranks.dist, memory_limit(), device)

    checks: Checks = {
        "GPUs": lambda: hardware.ranks(as_many_ranks(config, machine.result(), per_node), machine.result()),
        "memory": memory,
        "/dev/shm": lambda: [hardware.shared_memory(Path("/dev/shm"))],
        "disk": lambda: [folders.disk(paths.runs)],
        "file system": lambda: folders.file_system(paths.runs),
        "folders": lambda: folders.permissions(paths),
        "git": lambda: programs.git(paths.root),
        "Docker Compose": lambda: [programs.compose()],
        "this machine's name": lambda: [network.own_name(socket.gethostname())],
        f"port {number}": lambda: [network.port(number)],
        "MLflow": lambda: [mlflow.store(tracking_uri(paths))],
        "object storage": storage.copy,
    }
    # A copy of the package for one machine is without it.
    if find_spec("pipeline.cluster") is not None:
        engine = import_module("pipeline.doctor.engine")
        checks["engine"] = lambda: engine.place(config, os.environ)
        checks["GPUs of tasks"] = lambda: engine.bound_gpus(config.dist.world_size // config.dist.nodes, machine.result(), os.environ)
    if leader is not None:
        address = split(leader)
        checks["leader"] = lambda: [network.leader(*address)]
    return checks
