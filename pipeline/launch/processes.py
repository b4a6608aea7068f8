"""Our processes: those above us, those below us, and signals between them."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

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
    return next((one for one in psutil.Process().parents() if _is_dvc(one)), None)


def _is_dvc(process: psutil.Process) -> bool:
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


class Stopper:
    """Signals to this process for as long as a child runs: the first asks the child to stop, the second ends everything at once."""

    def __init__(self, child: int):
        self._child = child
        self._dvc = dvc_above()
        self.signal: int | None = None
        self.at_once = False

    def __enter__(self) -> "Stopper":
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        if self._before[signal.SIGHUP] == signal.SIG_IGN:
            # Under nohup the end of a terminal is no reason to stop.
            del self._before[signal.SIGHUP]
        for number in self._before:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            self.at_once = True
            self.signal = number
            kill(self._child)
            return
        self.signal = number
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGTERM)

    def if_orphaned(self) -> None:
        """DVC has gone and left us running: nobody would hear of the end, so stop and keep what there is."""
        if self._dvc is not None and not _is_dvc(self._dvc):
            self.ask()

    def ask(self) -> None:
        """Ask the child to stop, unless it was asked before."""
        if self.signal is None:
            self._on_signal(signal.SIGTERM, None)


def wait_for_orphans(child: int, seconds: float, given_up: Callable[[], bool]) -> None:
    """The child is gone; what it started may still be saving."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not given_up() and below(child):
        time.sleep(0.1)
