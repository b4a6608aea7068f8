"""Signals to the launcher: a stop request is passed on once; only a person's second request ends the ranks at once."""

import contextlib
import os
import signal
import time
from types import FrameType

from pipeline.launch.node import STORE
from pipeline.process_tree import dvc_above, is_dvc, kill
from pipeline.timeouts import STORM_SECONDS


class StopRequest:
    """Asks a child to stop on SIGTERM, SIGINT and SIGHUP.

    The first signal asks the child to stop. What follows within STORM_SECONDS belongs to the same request: an engine signals every
    process of a job, and `lead` and the agent pass the signal on. A later signal kills the child and all below it.
    `lead` turns its own first signal into SIGINT, perhaps late: below it, the first SIGINT is never a second request.
    """

    def __init__(self, child: int):
        self._child = child
        self._dvc = dvc_above()
        self._signalled_at: float | None = None
        self._awaits_lead = STORE in os.environ
        self._requested = False
        # The signal that asked first, or the one that ended it at once; SIGTERM if DVC or another machine asked.
        self.signal: int | None = None
        self.at_once = False

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Stop, or end at once if a person asks a second time."""
        now = time.monotonic()
        from_lead = self._awaits_lead and number == signal.SIGINT
        self._awaits_lead = self._awaits_lead and not from_lead
        if self._signalled_at is None:
            self._signalled_at = now
            self.request(number)
        elif not from_lead and now > self._signalled_at + STORM_SECONDS:
            self.at_once, self.signal = True, number
            kill(self._child)

    def request(self, number: int = signal.SIGTERM) -> None:
        """Ask the child to stop, once."""
        if self._requested:
            return
        self._requested, self.signal = True, number
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGTERM)

    def if_orphaned(self) -> None:
        """Stop if the DVC above is gone: nobody would hear of the end."""
        if self._dvc is not None and not is_dvc(self._dvc):
            self.request()
