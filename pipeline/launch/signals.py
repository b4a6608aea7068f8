"""Signals to the launcher: the first asks the ranks to stop, a person's second one ends them at once."""

import contextlib
import os
import signal
from types import FrameType

from pipeline.launch.process_tree import dvc_above, is_dvc, kill


class Stopper:
    """Signals to this process for as long as a child runs: the first asks the child to stop, the second ends everything at once."""

    def __init__(self, child: int):
        self._child = child
        self._dvc = dvc_above()
        self.signal: int | None = None
        self.at_once = False

    def __enter__(self) -> "Stopper":
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        if self._before[signal.SIGHUP] == signal.SIG_IGN:
            # Under nohup the end of a terminal is no reason to stop.
            del self._before[signal.SIGHUP]
        for number in self._before:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            self.at_once = True
            self.signal = number
            kill(self._child)
            return
        self.signal = number
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGTERM)

    def if_orphaned(self) -> None:
        """DVC has gone and left us running: nobody would hear of the end, so stop and keep what there is."""
        if self._dvc is not None and not is_dvc(self._dvc):
            self.ask()

    def ask(self) -> None:
        """Ask the child to stop, unless it was asked before."""
        if self.signal is None:
            self._on_signal(signal.SIGTERM, None)
