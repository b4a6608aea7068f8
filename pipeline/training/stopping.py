"""Stopping on request: a signal to any rank becomes one step at which all of them stop."""

import os
import signal
from collections.abc import Callable
from types import FrameType

from pipeline.ranks import Ranks


class Stop:
    """SIGTERM, SIGINT or SIGHUP asks for a stop; any further one changes nothing, as engines and agents repeat them."""

    def __init__(self, ranks: Ranks, alarm_seconds: int):
        self._ranks, self._alarm_seconds = ranks, alarm_seconds
        self._asked, self._saves, self._agent = False, False, os.getppid()
        self._answer: Callable[[], bool] | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self._is_orphaned() if self._saves else not self._asked:
            # A rank that waits for a peer that will never answer does not outlive its launcher for long.
            signal.alarm(self._alarm_seconds)
        self._asked = True

    def agreed(self) -> bool:
        """Return True if all ranks stop here; the question put by the last call is answered, so nobody waits for it."""
        answer = self._answer() if self._answer else False
        self._answer = self._ranks.start_logical_or(self._asked)
        if answer:
            self._begin_to_save()
        return answer

    def _begin_to_save(self) -> None:
        """Take the alarm back as long as the agent is there, which ends its ranks itself once its own grace is over."""
        self._saves, left_seconds = True, signal.alarm(0)
        if self._is_orphaned():
            signal.alarm(left_seconds or self._alarm_seconds)

    def _is_orphaned(self) -> bool:
        return os.getppid() != self._agent

    def close(self) -> None:
        """Wait for the last question, so that the group can be left."""
        if self._answer:
            self._answer()
        self._answer = None
        # What is left to do may take its time.
        signal.alarm(0)
