"""The process that keeps a run's copy up to date beside the training, `python -m pipeline.runs.copy_process RUN`.

It ends when its standard input is closed, which happens too when the launcher is killed: then it sends once more what there is.
"""

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

from pipeline.config import MachineError
from pipeline.files import locked
from pipeline.runs import copy
from pipeline.stop_signals import beside_a_training

log = logging.getLogger(__name__)

PAUSE_SECONDS = 2.0
# How late the copy may make an end: by a store that takes nothing, by one that goes on taking, and after a stop request.
DEAF_SECONDS, RECEIVING_SECONDS, STOPPED_SECONDS = 10.0, 600.0, 40.0


class CopyProcess:
    """Sends a run to object storage until it is told that the run has ended; nothing where no copy is asked for."""

    def __init__(self, run: Path, wanted: bool):
        self._run, self._process = run, None
        if not wanted or copy.configured() is None:
            return
        (run / "logs").mkdir(parents=True, exist_ok=True)
        copy.write_state(run, None)
        with (run / "logs" / "copy.log").open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.runs.copy_process", str(run)],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def close(self) -> None:
        """Say that the run has ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def finish(self, hurried: Event, say: Callable[[str], None], stopped: bool) -> None:
        """Wait until the copy is complete, for as long as storage takes it and nobody asks again to stop; say what it lacks."""
        process = self._process
        if process is None or process.stdout is None:
            return
        self.close()
        began_at = got_on_at = time.monotonic()
        while process.poll() is None and not hurried.is_set():
            now = time.monotonic()
            # A byte for everything that storage has taken.
            got_on_at = now if process.stdout.read(1 << 16) else got_on_at
            if now - got_on_at > DEAF_SECONDS or now - began_at > (STOPPED_SECONDS if stopped else RECEIVING_SECONDS):
                break
            time.sleep(0.05)
        if process.poll() is None:
            process.kill()
        process.stdout.close()
        if process.wait() != 0:
            why = copy.read_error(self._run) or f"see {self._run / 'logs' / 'copy.log'}"
            say(f"the copy does not have all of it yet ({why}); the next start sends the rest")


def follow(run: Path, closed: Event) -> bool:
    """Send what is new until the run has ended; returns True if the copy then has all of it."""
    where = copy.configured()
    assert where is not None
    target: copy.Copy | None = None
    while True:
        ending = closed.is_set()
        try:
            target = target or copy.Copy(run, *where, progress=report)
            target.send(ending)
            copy.write_state(run, None)
            if ending:
                return True
        except (MachineError, OSError, ValueError) as error:
            log.warning("%s", error)
            copy.write_state(run, str(error))
            if ending:
                return False
        closed.wait(PAUSE_SECONDS)


def report(_: int) -> None:
    """Write a byte for what storage has taken; a full pipe has told enough, and one without a reader is asked for nothing."""
    with contextlib.suppress(OSError):
        os.write(1, b".")


def main() -> int:
    """Run beside a training, in the time that it leaves over."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # Whoever stops the training wants its end to be in the copy.
    closed = beside_a_training()
    os.set_blocking(1, False)
    run = Path(sys.argv[1])
    # That of an earlier start may still be sending.
    with locked(run / "copy.lock"):
        return 0 if follow(run, closed) else 1


if __name__ == "__main__":
    sys.exit(main())
