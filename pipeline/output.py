"""Stdout and stderr as best effort: what their readers do not take is lost, and nothing else."""

import contextlib
import io
import os
import queue
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

# What waits for a reader, in writes, and how long the exit waits for one that takes nothing.
QUEUED_WRITES, READER_SECONDS = 1000, 1.0
# The most that a pipe takes as a whole.
PIECE_BYTES = 4096


class BestEffortStream(io.TextIOBase):
    """A text stream that raises no OSError; a lossy one does not block either, and drops what its reader does not take."""

    encoding = "utf-8"

    def __init__(self, descriptor: int, lossy: bool):
        self._descriptor, self._lossy, self._sent_bytes = descriptor, lossy, 0
        self._queue: queue.Queue[bytes] = queue.Queue(QUEUED_WRITES)
        threading.Thread(target=self._send, daemon=True).start()

    def write(self, text: str, /) -> int:
        """Queue the text."""
        with contextlib.suppress(queue.Full):
            self._queue.put(text.encode(self.encoding, "backslashreplace"), block=not self._lossy)
        return len(text)

    def fileno(self) -> int:
        """Return the descriptor that is written to."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return True if people watch it in a terminal."""
        return os.isatty(self._descriptor)

    def drain(self) -> None:
        """Wait for the reader; if the stream is lossy, not for one that takes nothing."""
        seen_bytes, seen_at = self._sent_bytes, time.monotonic()
        while self._queue.unfinished_tasks and not (self._lossy and time.monotonic() > seen_at + READER_SECONDS):
            time.sleep(0.01)
            if self._sent_bytes != seen_bytes:
                seen_bytes, seen_at = self._sent_bytes, time.monotonic()

    def give_up(self) -> None:
        """From now on wait for no reader that takes nothing."""
        self._lossy = True

    def _send(self) -> None:
        while True:
            content = self._queue.get()
            # EPIPE: the reader has gone; EIO: the terminal was closed.
            with contextlib.suppress(OSError):
                while content:
                    content = content[self._write(content[:PIECE_BYTES]) :]
            self._queue.task_done()

    def _write(self, piece: bytes) -> int:
        try:
            written = os.write(self._descriptor, piece)
        except BlockingIOError:
            # Another process has made the descriptor, which it shares with us, non-blocking.
            time.sleep(0.05)
            return 0
        self._sent_bytes += written
        return written


@contextmanager
def best_effort_output() -> Generator[None]:
    """Write stdout and stderr in a way that no reader, present or gone, can end or block this process."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Else the next file that is opened would be the one that messages go to.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    stdout, stderr = sys.stdout, sys.stderr
    # Results may have a pager for a reader, and no run waits for them.
    streams = BestEffortStream(1, lossy=False), BestEffortStream(2, lossy=True)
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            stream.drain()
        sys.stdout, sys.stderr = stdout, stderr


def wait_no_longer() -> None:
    """Let no output wait for a reader that takes nothing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, BestEffortStream):
            stream.give_up()
