"""The command line and the environment that start torchrun's agent."""

import os
import sys
from pathlib import Path

from pipeline.config import Dist
from pipeline.hardware.environment import for_ranks
from pipeline.launch.node import Node
from pipeline.timeouts import RETURN_SECONDS

# Effectively unlimited: RestartPolicy decides when to stop.
MAX_RESTARTS = 1_000_000


def command(module: str, node: Node, dist: Dist, logs: Path) -> list[str]:
    """Return torchrun's arguments, for its agent as extended here."""
    kind = "elastic" if module.startswith("pipeline.elastic.") else "launch"
    nodes, where = (1, "127.0.0.1:0") if kind == "elastic" else (node.nodes, node.endpoint)
    return [
        *(sys.executable, "-m", f"pipeline.{kind}.agent"),
        *(f"--nnodes={nodes}", f"--nproc-per-node={node.ranks}", f"--local-addr={node.address}"),
        # The id keeps two jobs apart. With several machines the store is the leader's, who keeps it through all of a job.
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={where}", f"--rdzv-id={node.job_id}"),
        f"--rdzv-conf=is_host={str(nodes == 1).lower()},join_timeout={RETURN_SECONDS}",
        *(f"--max-restarts={MAX_RESTARTS}", f"--shutdown-timeout={dist.grace_seconds}", f"--start-method={dist.start_method}"),
        *(f"--log-dir={logs}", "--redirects=3"),
        *("-m", module, str(logs / "job.json")),
    ]


def environment(node: Node) -> dict[str, str]:
    """Return the environment of the agent and its ranks."""
    here = str(Path(__file__).parents[2])
    # Defaults: a user who knows the network better sets these himself.
    network = {"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": f"={node.interface}"}
    return (
        network
        | for_ranks(os.environ, node.threads)
        | {
            "PYTHONPATH": os.pathsep.join([here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep),
            # A store of its own for every attempt: see ranks.rendezvous.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "LOCKSTEP_LEADS": str(int(node.leads)),
        }
        | ({"LOCKSTEP_MACHINE": node.name, "LOCKSTEP_GENERATIONS": node.endpoint} if node.name else {})
        | ({} if node.gpus is None else {"CUDA_VISIBLE_DEVICES": node.gpus})
    )
