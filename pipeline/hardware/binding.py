"""Ranks that take all CPUs of a machine: each is bound to its own."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from pipeline.hardware.cgroup import usable_cpus
from pipeline.hardware.sharing import take_cpus

THREADS = Path("/proc/self/task")
log = logging.getLogger(__name__)


def bind_to_cpus(device: str, threads: int, agreed: Callable[[bool], bool]) -> bool:
    """Bind every thread of this rank, and those that it starts from here on, to CPUs of its own, if ranks on CPUs take all of them.

    Returns True if it is bound.

    A rank that is woken by a message would often run on the sender's CPU, and both take turns until the kernel moves one of them.
    Beside another training that is bound none is: `agreed` tells whether all ranks of this machine have their CPUs to themselves.
    Call it after whoever counts the CPUs.
    """
    if device != "cpu" or sys.platform != "linux":
        return False
    cpus = sorted(os.sched_getaffinity(0))
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    own = own_cpus(cpus, usable_cpus(), ranks, rank, threads)
    # Nothing that fails here is an error: it is a matter of speed alone.
    with ExitStack() as locks, contextlib.suppress(OSError):
        if agreed(bool(own) and take_cpus(own, locks)):
            os.sched_setaffinity(0, own)
            for thread in THREADS.iterdir():
                # It may have ended.
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread.name), own)
            log.info("bound to CPUs %s", ", ".join(map(str, own)))
            # Until this process ends.
            locks.pop_all()
            return True
    return False


def own_cpus(cpus: list[int], usable: int, ranks: int, rank: int, threads: int) -> list[int]:
    """The CPUs of one of a machine's ranks; none where they do not take all, or may not: a quota or Slurm allows fewer."""
    return cpus[rank * threads : (rank + 1) * threads] if ranks * threads == len(cpus) == usable else []
