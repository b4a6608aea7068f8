"""Signals to a machine that waits for others."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_stop_request(handle: Callable[[], None]) -> Generator[None]:
    """Call `handle` on the first SIGTERM, SIGINT or SIGHUP; an engine repeats them, so the others are ignored, also afterwards."""
    # Under nohup the end of a terminal is no reason to stop.
    numbers = [one for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}
    requested = False

    def on_signal(_: int, __: FrameType | None) -> None:
        nonlocal requested
        if not requested:
            requested = True
            handle()

    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if requested else handler)
