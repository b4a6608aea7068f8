"""Signals to a machine that waits for others."""

import math
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from pipeline.stop_signals import handled_by
from pipeline.timeouts import STORM_SECONDS


@contextmanager
def on_stop_request(handle: Callable[[], None]) -> Generator[None]:
    """Call `handle` on SIGTERM, SIGINT or SIGHUP, and on a person's second one; what an engine repeats is ignored, also afterwards."""
    requested_at = math.inf

    def on_signal(_: int, __: FrameType | None) -> None:
        nonlocal requested_at
        now = time.monotonic()
        if not requested_at <= now <= requested_at + STORM_SECONDS:
            requested_at = min(requested_at, now)
            handle()

    with handled_by(on_signal) as before:
        try:
            yield
        finally:
            if requested_at != math.inf:
                before.update(dict.fromkeys(before, signal.SIG_IGN))
