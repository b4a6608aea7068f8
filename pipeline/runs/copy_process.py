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
from functools import partial
from pathlib import Path
from threading import Event

import psutil

from pipeline.config import MachineError
from pipeline.files import locked
from pipeline.runs import copy
from pipeline.runs.object_storage import Refused, configured
from pipeline.stop_signals import beside_a_training, deferred

log = logging.getLogger(__name__)

# Between two looks at the run, and after many errors.
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 60.0
# How late the copy may make an end: by a store that neither takes nor answers anything, by one that does, and after a stop request.
NO_PROGRESS_SECONDS, RECEIVING_SECONDS, STOPPED_SECONDS = 10.0, 600.0, 40.0
# At nice 19, on a busy machine, the process may need long to ask storage: what it computes is progress too. Linux counts it in hundredths
# of a second. To ask a deaf store twice took 3 to 8 ms of an AMD EPYC.
COMPUTED_SECONDS = 0.025
# Held by the process that sends, and touched for whatever storage takes or answers.
LOCK = "copy.lock"


class CopyProcess:
    """Sends a run to object storage until it is told that the run has ended; nothing where no copy is asked for."""

    def __init__(self, run: Path, wanted: bool):
        self._run, self._process, self._told = run, None, False
        if not wanted or configured() is None:
            return
        (run / "logs").mkdir(parents=True, exist_ok=True)
        copy.write_state(run, None)
        with (run / "logs" / "copy.log").open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.runs.copy_process", str(run)],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
            )

    def look(self, say: Callable[[str], None]) -> None:
        """Say it, once, if storage does not take the copy, or nobody sends it any more."""
        if self._process is None or self._told:
            return
        error = copy.read_state(self._run).get("error")
        if error is None and self._process.poll() is not None:
            error = f"its process has ended; see {self._run / 'logs' / 'copy.log'}"
        if error:
            say(f"the training goes on without a copy for now: {error}")
            self._told = True

    def close(self) -> None:
        """Say that the run has ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def finish(self, stop_waiting: Event, stopped: bool = False) -> str | None:
        """Wait until the copy is complete, while its process gets on and nobody asks again to stop; returns why it is not."""
        process = self._process
        if process is None:
            return None
        self.close()
        began_at = got_on_at = time.monotonic()
        touched_before, computed_before = touched(self._run), 0.0
        while process.poll() is None and not stop_waiting.is_set():
            now, computed = time.monotonic(), computed_before
            with contextlib.suppress(psutil.Error):
                computed = sum(psutil.Process(process.pid).cpu_times()[:2])
            # By the process of an earlier start, too, while this one waits for its end.
            touched_now = touched(self._run)
            if touched_now != touched_before or computed - computed_before > COMPUTED_SECONDS:
                got_on_at, touched_before, computed_before = now, touched_now, computed
            if now - got_on_at > NO_PROGRESS_SECONDS or now - began_at > (STOPPED_SECONDS if stopped else RECEIVING_SECONDS):
                break
            time.sleep(0.05)
        killed = process.poll() is None
        if killed:
            process.kill()
        if process.wait() == 0:
            return None
        given_up = f"the rest took too long; see {self._run / 'logs' / 'copy.log'}"
        return copy.read_state(self._run).get("error") or (given_up if killed else f"see {self._run / 'logs' / 'copy.log'}")


def complete(run: Path, say: Callable[[str], None]) -> str | None:
    """Send what the copy of a run that has ended lacks; returns why it still does."""
    if not copy.is_incomplete(run):
        return None
    with deferred() as signalled:
        error = CopyProcess(run, True).finish(signalled)
    say(f"{run.name}: the copy {f'does not have all of it yet ({error})' if error else 'has all of it'}")
    return error


def follow(run: Path, closed: Event) -> bool:
    """Send what is new until the run has ended; returns True if the copy then has all of it."""
    where = configured()
    assert where is not None
    target: copy.Copy | None = None
    pause = PAUSE_SECONDS
    while True:
        ending = closed.is_set()
        try:
            target = target or copy.Copy(run, *where, progress=partial(report, run))
            target.send(ending)
            copy.write_state(run, None, complete=ending)
            pause = PAUSE_SECONDS
            if ending:
                return True
        except (MachineError, OSError, ValueError) as error:
            log.warning("%s", error)
            copy.write_state(run, str(error))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            if ending or isinstance(error, Refused):
                return False
        closed.wait(pause)


def report(run: Path, _: int) -> None:
    """Touch the lock, as storage has taken or answered something."""
    with contextlib.suppress(OSError):
        os.utime(run / LOCK)


def touched(run: Path) -> int:
    """Return when that was; 0 if nobody knows."""
    with contextlib.suppress(OSError):
        return (run / LOCK).stat().st_mtime_ns
    return 0


def main() -> int:
    """Run beside a training, in the time that it leaves over."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # Whoever stops the training wants its end to be in the copy.
    closed = beside_a_training()
    run = Path(sys.argv[1])
    # That of an earlier start may still be sending.
    with locked(run / LOCK):
        return 0 if follow(run, closed) else 1


if __name__ == "__main__":
    sys.exit(main())
