"""The signals that ask a process to stop: who handles them for a while, and what a launcher makes of them."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Event, Thread
from types import FrameType
from typing import Any

from pipeline.process_tree import STORE, dvc_above, is_dvc, kill
from pipeline.timeouts import STORM_SECONDS

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What a process ends with that such a signal has ended, or that says so as a shell does.
STOP_EXITS = tuple(code for number in STOP_SIGNALS for code in (-number, 128 + number))


def signal_name(number: int) -> str:
    """The name of a signal, or its number if it has none, as those from 35 to 63."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
    """Set an event on a signal to stop, which is the caller's to obey."""
    signalled = Event()
    with handled_by(lambda *_: signalled.set()):
        yield signalled


def beside_a_training() -> Event:
    """Give way to a training, outlive stop requests, and return an event that is set once whoever started this has ended, or says so.

    Both close standard input.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)
    if sys.platform == "linux":
        # When it wakes up it does not interrupt a rank, and gets its share later. A sandbox may not allow that.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    closed = Event()
    Thread(target=lambda: (sys.stdin.read(), closed.set()), daemon=True).start()
    return closed


class StopRequest:
    """What SIGTERM, SIGINT and SIGHUP ask of a launcher, from before its agent starts until MLflow has been waited for.

    The first signal asks the agent to stop. What follows within STORM_SECONDS belongs to the same request: an engine signals every
    process of a job, and `lead` and the agent pass the signal on. A later signal kills the agent and all below it. Once the agent has
    ended, a new request only ends the wait for MLflow.
    `lead` turns its own first signal into SIGINT, perhaps late: below it, the first SIGINT is never a second request.
    """

    def __init__(self) -> None:
        self._agent: int | None = None
        self._dvc = dvc_above()
        self._signalled_at: float | None = None
        self._awaits_lead = STORE in os.environ
        self._ranks_ended = False
        # The signal that asked first, or the one that ended it at once; SIGTERM if DVC or another machine asked.
        self.signal: int | None = None
        self.at_once = False
        # Set when nothing is to be waited for any more.
        self.hurried = Event()

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Stop, or end at once if a person asks a second time."""
        now, first = time.monotonic(), self._signalled_at is None
        from_lead = self._awaits_lead and number == signal.SIGINT
        self._awaits_lead = self._awaits_lead and not from_lead
        if self._signalled_at is None:
            self._signalled_at = now
        elif from_lead or now <= self._signalled_at + STORM_SECONDS:
            return
        if self._ranks_ended:
            self.hurried.set()
        elif first:
            self.request(number)
            if number == signal.SIGINT and not from_lead and sys.stderr.isatty():
                # Not by `print`, which this may have interrupted.
                with contextlib.suppress(OSError):
                    os.write(sys.stderr.fileno(), b"\nstopping, which takes some seconds; Ctrl-C after three seconds ends it at once\n")
        else:
            self.at_once, self.signal = True, number
            self._pass_on()

    def request(self, number: int = signal.SIGTERM) -> None:
        """Ask the agent to stop, once."""
        if self.signal is None:
            self.signal = number
            self._pass_on()

    def agent_started(self, pid: int) -> None:
        """Pass requests on to this agent; also one that came before it."""
        self._agent = pid
        if self.signal is not None:
            self._pass_on()

    def agent_ended(self) -> None:
        """Pass nothing on any more."""
        self._agent, self._ranks_ended = None, True

    def _pass_on(self) -> None:
        if self._agent is not None and self.at_once:
            kill(self._agent)
        elif self._agent is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._agent, signal.SIGTERM)

    def if_orphaned(self) -> None:
        """Stop if the DVC above is gone: nobody would hear of the end."""
        if self._dvc is not None and not is_dvc(self._dvc):
            self.request()
