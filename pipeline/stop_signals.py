"""The signals that ask a process to stop, and who handles them for a while."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Generator[dict[int, Any]]:
    """Call `handler` on a signal to stop; yields the handlers that are set again afterwards, by signal."""
    # Under nohup the end of a terminal is no reason to stop.
    numbers = [one for one in STOP_SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield before
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def deferred() -> Generator[Event]:
    """Set an event on a signal to stop, and obey it no further: the ranks have ended, and what is left takes seconds."""
    signalled = Event()
    with handled_by(lambda *_: signalled.set()):
        yield signalled
