"""Ranks that take all CPUs of a machine: each is bound to its own."""

import contextlib
import os
import sys
from pathlib import Path

THREADS = Path("/proc/self/task")


def bind_to_cpus(device: str, threads: int) -> None:
    """Bind every thread of this rank to its own CPUs, if ranks compute on CPUs, and those of this machine take all that they may use.

    A rank that is woken by a message would often run on the sender's CPU, and both take turns until the kernel moves one of them.
    Call it when data are open: whoever decodes counts the CPUs that all ranks share.
    """
    if device != "cpu" or sys.platform != "linux":
        return
    cpus, ranks = sorted(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks * threads != len(cpus):
        return
    first = int(os.environ.get("LOCAL_RANK", "0")) * threads
    for thread in THREADS.iterdir():
        # It may have ended, or a sandbox may not allow it.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), cpus[first : first + threads])
