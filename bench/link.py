"""Steps on two machines of two ranks with a slow link between them: network namespaces of this one, by root with `ip` and `tc`."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from bench.jobs import ROOT
from pipeline.launch.agent_command import environment
from pipeline.launch.node import Node

# Namespace, its end of the link, its address.
MACHINES = tuple((f"lockstep-{os.getpid()}-{number}", f"link-{number}", f"10.97.0.{number}") for number in (1, 2))
PORT = 29555


@contextmanager
def link(rate: str) -> Generator[None]:
    """Two namespaces and a link between them that carries so much each way, as `1gbit`."""
    with ExitStack() as undo:
        for name, _, _ in MACHINES:
            call("ip", "netns", "add", name)
            undo.callback(call, "ip", "netns", "del", name)
        (one, its_end, _), (other, other_end, _) = MACHINES
        call("ip", "link", "add", its_end, "netns", one, "type", "veth", "peer", "name", other_end, "netns", other)
        for name, end, address in MACHINES:
            call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                call("ip", "-n", name, "link", "set", device, "up")
            shape = ("tbf", "rate", rate, "burst", "128kb", "latency", "400ms")
            call("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", *shape)
        yield


def call(*words: str) -> None:
    subprocess.run(words, check=True)


def steps(model: str, pairs: int, seconds: float) -> dict[str, Any]:
    """What `steps.py` finds of every algorithm, on both machines."""
    processes: list[subprocess.Popen[str]] = []
    for number, (name, end, _) in enumerate(MACHINES):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}"]
        place = [f"--master-addr={MACHINES[0][2]}", f"--master-port={PORT}"]
        script = [str(ROOT / "bench" / "steps.py"), model, str(pairs), str(seconds), "algorithms"]
        variables = environment(Node(2, 1)) | {"GLOO_SOCKET_IFNAME": end, "LOCKSTEP_LEADS": str(int(number == 0))}
        words = ["ip", "netns", "exec", name, *torchrun, *place, *script]
        processes.append(subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True))
    try:
        said = processes[0].communicate()[0]
        assert [process.wait(60) for process in processes] == [0, 0], "a machine's torchrun failed"
    finally:
        for process in processes:
            process.kill()
    return json.loads(said.splitlines()[-1])
