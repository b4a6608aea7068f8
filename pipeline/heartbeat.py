"""The heartbeat of a rank: where it is, in a few bytes that its launcher reads while it runs, its stacks on demand, its last words."""

import faulthandler
import mmap
import os
import signal
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

FORM = struct.Struct("<6q")
# With room for last words: on a full disk nothing could be written but what is there already.
SIZE_BYTES = 4096
STARTING, COMPUTING, WAITING, FINISHING, LEAVING = range(5)
AT_WORK = (COMPUTING, FINISHING)
BEAT_SECONDS = 1


class Heartbeat:
    """Tells of every step, and of every piece of work in it; without a folder nobody listens."""

    def __init__(self, folder: Path | None):
        self._rank, self._step, self._beats = -1, -1, 0
        if folder is None:
            self._shown = mmap.mmap(-1, SIZE_BYTES)
            return
        # SIGUSR1 writes down what every thread does, also where Python itself hangs in a call.
        faulthandler.register(signal.SIGUSR1, (folder / "stacks.log").open("w"))
        with (folder / ".heartbeat").open("w+b") as file:
            # Written and not only mapped: on a full disk the one is an error, the other a death by SIGBUS.
            file.write(FORM.pack(os.getpid(), self._rank, self._step, STARTING, 0, 0).ljust(SIZE_BYTES, b"\0"))
            file.flush()
            self._shown = mmap.mmap(file.fileno(), SIZE_BYTES)
        # Whoever finds it may read it.
        os.replace(folder / ".heartbeat", folder / "heartbeat")

    def seated(self, rank: int) -> None:
        """By which rank it is known; torchrun's own count is another one."""
        self._rank = rank
        self._show(STARTING)

    def computing(self, step: int | None = None) -> None:
        """Something of one's own begins, in this step or in the same one."""
        self._step = self._step if step is None else step
        self._show(COMPUTING)

    def waiting(self) -> None:
        """The own part is done; from here on it is for the others."""
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
        """All is done but for the others, of whom one may be finishing."""
        self._show(LEAVING)

    def _show(self, phase: int) -> None:
        self._beats += 1
        FORM.pack_into(self._shown, 0, os.getpid(), self._rank, self._step, phase, self._beats, 0)


def write_exit_reason(folder: Path, text: str, exit_code: int) -> None:
    """Why this rank ends."""
    with (folder / "heartbeat").open("r+b") as file:
        file.seek(FORM.size - 8)
        file.write(exit_code.to_bytes(8, "little") + text.encode()[: SIZE_BYTES - FORM.size])


class Snapshot(NamedTuple):
    """What a launcher sees of a rank."""

    pid: int
    rank: int
    step: int
    phase: int
    beats: int
    exit_code: int
    words: str


def read(folder: Path) -> Snapshot | None:
    """The sign of the rank whose folder this is, once it gives one."""
    try:
        content = (folder / "heartbeat").read_bytes()
    except FileNotFoundError:
        return None
    if len(content) < SIZE_BYTES:
        return None
    pid, rank, step, phase, beats, exit_code = FORM.unpack(content[: FORM.size])
    words = content[FORM.size :].rstrip(b"\0").decode(errors="replace")
    # Before it is seated it has only torchrun's number, which is its folder's name.
    return Snapshot(pid, rank if rank >= 0 else int(folder.name), step, phase, beats, exit_code, words)
