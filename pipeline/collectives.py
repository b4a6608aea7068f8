"""Waiting for a collective, also for one that gloo does not bring to an end.

A peer's end may be missed by gloo (torch 2.14) where it is about to send to it: the write fails before the loop has seen the connection
close, and the operation is queued on a connection that is no more. Nobody is told, until its timeout of ten minutes.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor

SLICE = timedelta(seconds=0.5)
# In a job whose ranks go on without a lost one: set once collectives of this rank's group wait in vain.
in_vain: threading.Event | None = None


class Shared(Protocol):
    """Memory that all ranks share."""

    def start_maximum(self, value: int) -> Callable[[], int]: ...
    def gathered(self, own: Tensor) -> Tensor | None: ...


def watch() -> threading.Event:
    """Let waits end from here on, with the error of a lost connection, once the event is set."""
    global in_vain
    in_vain = threading.Event()
    return in_vain


def wait(work: Any) -> None:
    """Wait for a collective that was started with async_op=True."""
    if in_vain is None:
        work.wait()
        return
    while True:
        try:
            work.wait(SLICE)
            return
        except RuntimeError as error:
            if "Operation timed out" not in str(error):
                raise
        if in_vain.is_set():
            raise RuntimeError("Connection closed by a peer, and gloo waits on")
