"""A rank's heartbeat: step and phase in a small mapped file that the supervisor reads, its stacks on SIGUSR1, its exit reason."""

import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

FORM = struct.Struct("<6q")
# With room for the exit reason: on a full disk only what is allocated already can be written.
SIZE_BYTES = 4096
STARTING, COMPUTING, WAITING, FINISHING, LEAVING, OUTSIDE = range(6)
AT_WORK = (COMPUTING, FINISHING)
BEAT_SECONDS = 1


class Heartbeat:
    """Shows every step and every phase in it; without a folder nobody reads it."""

    def __init__(self, folder: Path | None):
        self._rank, self._step, self._beats = -1, -1, 0
        # How long this rank has waited for its peers, since ever.
        self.waited_seconds = 0.0
        self._phase, self._since = STARTING, time.monotonic()
        if folder is None:
            self._shown = mmap.mmap(-1, SIZE_BYTES)
            return
        # On SIGUSR1 the stacks of all threads are written, also while Python hangs in a call.
        faulthandler.register(signal.SIGUSR1, (folder / "stacks.log").open("w"))
        with (folder / ".heartbeat").open("w+b") as file:
            # Written before it is mapped: a full disk is then an error, and not a SIGBUS.
            file.write(FORM.pack(os.getpid(), self._rank, self._step, STARTING, 0, 0).ljust(SIZE_BYTES, b"\0"))
            file.flush()
            self._shown = mmap.mmap(file.fileno(), SIZE_BYTES)
        # A reader finds the whole file or none.
        os.replace(folder / ".heartbeat", folder / "heartbeat")

    def set_rank(self, rank: int) -> None:
        """Set the rank, which is not torchrun's: see ranks.rendezvous."""
        self._rank = rank
        self._show(STARTING)

    @property
    def beats(self) -> int:
        """A number that changes whenever the rank gets on."""
        return self._beats

    def computing(self, step: int | None = None) -> None:
        """Compute: in this step, or on in the same one."""
        self._step = self._step if step is None else step
        self._show(COMPUTING)

    def waiting(self) -> None:
        """Enter a collective, and wait for the peers."""
        self._show(WAITING)

    @contextmanager
    def beating(self, phase: int = COMPUTING) -> Generator[None]:
        """Beat from a thread while something runs that has no steps, such as writing a large file."""
        self._show(phase)
        done = threading.Event()
        thread = threading.Thread(target=lambda: self._beat(phase, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat(self, phase: int, done: threading.Event) -> None:
        while not done.wait(BEAT_SECONDS):
            self._show(phase)

    def leaving(self) -> None:
        """Wait in the last barrier for the peers, of which one may be writing the model."""
        self._show(LEAVING)

    def outside(self) -> None:
        """Wait outside of any group, perhaps for long; called again and again, so that whoever does not is known to hang."""
        self._show(OUTSIDE)

    def _show(self, phase: int) -> None:
        now = time.monotonic()
        if self._phase == WAITING:
            self.waited_seconds += now - self._since
        self._phase, self._since = phase, now
        self._beats += 1
        FORM.pack_into(self._shown, 0, os.getpid(), self._rank, self._step, phase, self._beats, 0)


def write_exit_reason(folder: Path, text: str, exit_code: int) -> None:
    """Write why this rank ends, and with which exit code."""
    with (folder / "heartbeat").open("r+b") as file:
        file.seek(FORM.size - 8)
        file.write(exit_code.to_bytes(8, "little") + text.encode()[: SIZE_BYTES - FORM.size])


class Snapshot(NamedTuple):
    """A rank's heartbeat at one time."""

    pid: int
    rank: int
    step: int
    phase: int
    beats: int
    exit_code: int
    exit_reason: str


def read(folder: Path) -> Snapshot | None:
    """Return the heartbeat of the rank whose folder this is, or None before its first."""
    try:
        content = (folder / "heartbeat").read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < SIZE_BYTES:
        return None
    pid, rank, step, phase, beats, exit_code = FORM.unpack(content[: FORM.size])
    reason = content[FORM.size :].rstrip(b"\0").decode(errors="replace")
    # Before the rendezvous a rank has only torchrun's local rank, the name of its folder.
    return Snapshot(pid, rank if rank >= 0 else int(folder.name), step, phase, beats, exit_code, reason)
