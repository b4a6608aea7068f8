"""Ranks that take all CPUs of a machine: each is bound to its own."""

import contextlib
import logging
import os
import sys
from pathlib import Path

from pipeline.hardware.cgroup import usable_cpus
from pipeline.hardware.sharing import keep

THREADS = Path("/proc/self/task")
log = logging.getLogger(__name__)


def bind_to_cpus(device: str, threads: int) -> None:
    """Bind every thread of this rank, and those that it starts from here on, to CPUs of its own, if ranks on CPUs take all of them.

    A rank that is woken by a message would often run on the sender's CPU, and both take turns until the kernel moves one of them.
    Call it before memory is touched, so that it is near, and after whoever counts the CPUs.
    """
    if device != "cpu" or sys.platform != "linux":
        return
    cpus = sorted(os.sched_getaffinity(0))
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    own = own_cpus(cpus, usable_cpus(), ranks, rank, threads)
    # No lock, no binding: it is a matter of speed alone.
    with contextlib.suppress(OSError):
        if own and keep([f"cpu{cpu}" for cpu in own]):
            for thread in THREADS.iterdir():
                # It may have ended.
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread.name), own)
            log.info("bound to CPUs %s", ", ".join(map(str, own)))


def own_cpus(cpus: list[int], usable: int, ranks: int, rank: int, threads: int) -> list[int]:
    """The CPUs of one of a machine's ranks; none where they do not take all, or may not: a quota or Slurm allows fewer."""
    return cpus[rank * threads : (rank + 1) * threads] if ranks * threads == len(cpus) == usable else []
