"""Signals to a machine that waits for others."""

import math
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from pipeline.timeouts import STORM_SECONDS


@contextmanager
def on_stop_request(handle: Callable[[], None]) -> Generator[None]:
    """Call `handle` on SIGTERM, SIGINT or SIGHUP, and on a person's second one; what an engine repeats is ignored, also afterwards."""
    # Under nohup the end of a terminal is no reason to stop.
    numbers = [one for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}
    requested_at = math.inf

    def on_signal(_: int, __: FrameType | None) -> None:
        nonlocal requested_at
        now = time.monotonic()
        if not requested_at <= now <= requested_at + STORM_SECONDS:
            requested_at = min(requested_at, now)
            handle()

    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if requested_at == math.inf else signal.SIG_IGN)
