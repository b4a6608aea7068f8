"""Stopping on request: a signal to any rank becomes one step at which all of them stop."""

import os
import signal
from collections.abc import Callable
from types import FrameType

from pipeline.ranks import Ranks

# Longer than a launcher waits.
LAST_SECONDS = 90


class Stop:
    """SIGTERM or SIGINT asks for a stop; a second one ends this process at once."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._asked = False
        self._answer: Callable[[], bool] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self._asked:
            os._exit(128 + number)
        self._asked = True
        # Whoever waits for a peer that will never answer does not outlive its launcher for long.
        signal.alarm(LAST_SECONDS)

    def agreed(self) -> bool:
        """Whether all ranks stop before this step; the question put one step ago is answered, so nobody waits for it."""
        answer = self._answer() if self._answer else False
        self._answer = self._ranks.start_any(self._asked)
        return answer

    def close(self) -> None:
        """Wait for the last question, so that the group can be left."""
        if self._answer:
            self._answer()
        self._answer = None
        # It did not hang, and what is left to do may take its time.
        signal.alarm(0)
