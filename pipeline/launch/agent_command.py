"""The command line and the environment that start torchrun's agent."""

import os
import sys
from pathlib import Path

from pipeline.launch.node import Node
from pipeline.timeouts import RETURN_SECONDS

# Effectively unlimited: RestartPolicy decides when to stop.
MAX_RESTARTS = 1_000_000


def command(module: str, node: Node, grace_seconds: int, logs: Path) -> list[str]:
    """Return torchrun's arguments, for its agent as extended here."""
    return [
        *(sys.executable, "-m", "pipeline.launch.agent"),
        *(f"--nnodes={node.nodes}", f"--nproc-per-node={node.ranks}", f"--local-addr={node.address}"),
        # The id keeps two jobs apart. With several machines the store is the leader's, who keeps it through all of a job.
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={node.endpoint}", f"--rdzv-id={node.job_id}"),
        f"--rdzv-conf=is_host={str(node.nodes == 1).lower()},join_timeout={RETURN_SECONDS}",
        *(f"--max-restarts={MAX_RESTARTS}", f"--shutdown-timeout={grace_seconds}"),
        *(f"--log-dir={logs}", "--redirects=3"),
        *("-m", module, str(logs / "job.json")),
    ]


def environment(node: Node) -> dict[str, str]:
    """Return the environment of the agent and its ranks."""
    here = str(Path(__file__).parents[2])
    # torchrun reads PET_*, which a scheduler has set for the command above us.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    # Defaults: a user who knows the network better sets these himself.
    network = {"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": f"={node.interface}"}
    return (
        network
        | kept
        | {
            "PYTHONPATH": os.pathsep.join([here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep),
            "OMP_NUM_THREADS": str(node.threads),
            "MKL_NUM_THREADS": str(node.threads),
            # A store of its own for every attempt: see ranks.rendezvous.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # torch logs at this level, and ends at import if it does not know its name.
            "LOGLEVEL": "WARNING",
            "LOCKSTEP_LEADS": str(int(node.leads)),
            # cuBLAS is deterministic only with a workspace of fixed size.
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
    )
