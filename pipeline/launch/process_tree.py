"""Our processes: those above us, those below us, and signals between them."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """What outlives our children becomes our child, so that we can wait for it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def dies_with_parent() -> Callable[[], None] | None:
    """For `preexec_fn`: the child gets SIGTERM when we end, however we end."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def dvc_above() -> psutil.Process | None:
    """The DVC that started this process, if one did."""
    return next((one for one in psutil.Process().parents() if is_dvc(one)), None)


def is_dvc(process: psutil.Process) -> bool:
    try:
        return process.is_running() and "dvc" in (Path(word).name for word in process.cmdline()[:3])
    except psutil.Error:
        # Gone, or a zombie.
        return False


def below(child: int) -> list[psutil.Process]:
    """Our living descendants that a child of ours started, and the child: those of its session, and of sessions that they opened."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, ChildProcessError):
            if os.getsid(process.pid) == os.getsid(0):
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
            elif process.pid != child:
                os.waitpid(process.pid, os.WNOHANG)
    return found


def kill(child: int) -> None:
    """End a child and all that it started, at once."""
    for process in below(child):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def wait_for_orphans(child: int, seconds: float, given_up: Callable[[], bool]) -> None:
    """The child is gone; what it started may still be saving."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not given_up() and below(child):
        time.sleep(0.1)
