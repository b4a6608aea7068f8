"""Waiting for what another process does, always with a limit."""

import resource
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T], process: "subprocess.Popen[Any] | None" = None, seconds: float = 120, every_seconds: float = 0.01
) -> T:
    """Return what the condition returns once it is true; AssertionError after so many seconds, or if the process ends before."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if process is not None and process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode} before that: {process.communicate()[0]}")
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(every_seconds)
    return found


def child_cpu_seconds() -> float:
    """The CPU time of all children that have ended and were waited for: unlike wall time, a busy machine does not change it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
