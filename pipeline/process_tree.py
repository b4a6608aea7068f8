"""The processes above and below this one."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

# How the commands below `lead` know its store, the number of machines, and how few and many there may be where that varies.
STORE, NODES, SIZE = "LOCKSTEP_STORE", "LOCKSTEP_NODES", "LOCKSTEP_SIZE"
# A file that is there once `lead` was told to stop.
STOP_FILE = "LOCKSTEP_STOP_FILE"
# What a person types to go on, set by `lead` and by `make repro`; without it that is `dvc repro`, or the command itself.
TYPED_COMMAND = "LOCKSTEP_TYPED_COMMAND"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Become a child subreaper: orphaned grandchildren are re-parented to this process, which can then wait for them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def dies_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` with which the child gets SIGTERM when this process ends, however it ends."""
    if sys.platform != "linux":
        return None
    return partial(die_with, os.getpid(), ctypes.CDLL(None).prctl)


def die_with(parent: int, prctl: Callable[..., int] | None = None) -> None:
    """Have the kernel send SIGTERM to this process when its parent ends; a parent that has ended already is noticed too."""
    if sys.platform != "linux":
        return
    (prctl or ctypes.CDLL(None).prctl)(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


def ignores_interrupts() -> None:
    """Leave a terminal's Ctrl-C, which all processes of a group get, to the one that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def dvc_above() -> psutil.Process | None:
    """Return the DVC process that started this one, or None."""
    return next((one for one in psutil.Process().parents() if is_dvc(one)), None)


def is_dvc(process: psutil.Process) -> bool:
    """Return True if a process runs and is DVC."""
    try:
        words = [Path(word).name for word in process.cmdline()[:3]]
        runs_python = words[:1] != [] and words[0].startswith("python")
        return process.is_running() and (words[:1] == ["dvc"] or (runs_python and (words[1:2] == ["dvc"] or words[1:] == ["-m", "dvc"])))
    except psutil.Error:
        # Gone, or a zombie.
        return False


def below(child: int) -> list[psutil.Process]:
    """Return a child and its living descendants: all of ours outside of our own session. Reaps zombies."""
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
    """Send SIGKILL to a child and to all its descendants."""
    for process in below(child):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def wait_for_orphans(child: int, seconds: float, given_up: Callable[[], bool]) -> None:
    """Wait for the descendants of a child that has ended, which may still be saving."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not given_up() and below(child):
        time.sleep(0.1)


class FirstSeen:
    """Processes as they were when their pids were first asked for: a pid may be reused."""

    def __init__(self) -> None:
        self._processes = dict[int, psutil.Process | None]()

    def runs(self, pid: int) -> bool:
        """Return True if the process that was first seen under this pid still runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if pid not in self._processes:
                self._processes[pid] = None
                self._processes[pid] = psutil.Process(pid)
            process = self._processes[pid]
            return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False


def status_of(pid: int) -> str:
    """Return psutil's word for what a process does, or "gone"."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
