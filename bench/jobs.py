"""A script of this folder as one torchrun job."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from pipeline.launch.agent_command import environment
from pipeline.launch.node import Node

ROOT = Path(__file__).parents[1]


def torchrun(script: str, *arguments: str, ranks: int = 2, limit_seconds: float | None = None) -> str:
    """What a script prints as one torchrun job, which is killed with its ranks after the limit."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(ROOT / "bench" / script),
        *arguments,
    ]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment(Node(ranks, 1)), stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        said, errors = process.communicate(timeout=limit_seconds)
    finally:
        # Also after Ctrl-C, which a session of its own does not hear; torchrun ends its ranks when it is told to stop.
        for number in (signal.SIGTERM, signal.SIGKILL) if process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                # For half a minute it waits for ranks that do not end.
                process.wait(45)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, said, errors)
    return said
