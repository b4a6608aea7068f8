"""Memory that ranks of one machine share: what is small is gathered there, and each shows how far it has come.

A message between them costs more than what it carries: whoever sleeps until it comes is woken late. Here a rank that waits looks again
and again for a moment, and then ever more seldom.
"""

import logging
import mmap
import os
import platform
import select
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from pipeline.ranks import Ranks
from pipeline.timeouts import collective_seconds

log = logging.getLogger(__name__)

# Ranks that compute as much end most steps within this time of each other; longer, the mirror would hardly get the CPU.
SPIN_SECONDS = 0.003
# Then a rank sleeps for this share of what it has waited already, and this long at most.
SLEEP_SHARE, SLEEP_SECONDS = 1 / 50, 0.02
# All that is shared. Beyond it messages take little of a step, and each rank would read much.
MOST_BYTES = 256 << 20
# What a log line gathers is less, but for hundreds of lanes; more is sent.
MOST_GATHERED_BYTES = 1 << 14
PAGE_BYTES, WORD_BYTES = 4096, 8
# The words of a rank's page: how many sums of gradients, of buffers, and rows to be gathered it has written, and its questions.
GRADIENTS, BUFFERS, GATHERED, QUESTIONS = 0, 16, 32, 64
NAME = "lockstep-shared"
# So many are under way at most, and a value is less than this.
QUESTIONS_KEPT, VALUES = 64, 256


class SharedMemory:
    """A page for each rank, which it alone writes, and room for what it adds. The others must see its writes in their order, as on x86."""

    def __init__(self, ranks: Ranks, mapped: mmap.mmap, room: int, pids: list[int], timeout_seconds: float):
        self._rank, self._size, self._timeout_seconds = ranks.rank, ranks.size, timeout_seconds
        self._words = memoryview(mapped).cast("q")
        content = torch.frombuffer(mapped, dtype=torch.uint8, offset=PAGE_BYTES * self._size)
        self._rooms, self._taken = content.view(self._size, room), 0
        # Two of them, in turn: whoever has written in the one has read the other.
        self._rows, self._gathered = [self.take(MOST_GATHERED_BYTES) for _ in range(2)], 0
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._ends, self._questions = select.poll(), 0
        # Readable once it has ended, whoever waits for it; until this process ends.
        for number in opened_pids([pids[rank] for rank in self._others]):
            self._ends.register(number, select.POLLIN)

    def take(self, size_bytes: int) -> list[Tensor]:
        """Take so much of every rank's room."""
        first, self._taken = self._taken, self._taken + size_bytes
        return [room[first : self._taken] for room in self._rooms]

    def write(self, word: int, value: int) -> None:
        """Set a word of this rank's page."""
        self._words[self._rank * PAGE_BYTES // WORD_BYTES + word] = value

    def are_at(self, word: int, value: int) -> bool:
        """Whether this word has come to a value on every other rank."""
        return all(self._words[rank * PAGE_BYTES // WORD_BYTES + word] >= value for rank in self._others)

    def wait(self, word: int, value: int) -> None:
        """Wait until it has; an error in gloo's words if a rank ends before."""
        started_at = time.monotonic()
        while not self.are_at(word, value):
            waited_seconds = time.monotonic() - started_at
            if waited_seconds < SPIN_SECONDS:
                os.sched_yield()
                continue
            if self._ends.poll(0) and not self.are_at(word, value):
                raise RuntimeError("Connection closed by peer: it has ended")
            if waited_seconds > self._timeout_seconds:
                raise RuntimeError(f"Timed out waiting {waited_seconds:.0f} s for another rank")
            time.sleep(min(waited_seconds * SLEEP_SHARE, SLEEP_SECONDS))

    def gathered(self, own: Tensor) -> Tensor | None:
        """Return the rows of all ranks, in their order, each as many; None if they are too large."""
        size_bytes = own.numel() * own.element_size()
        if size_bytes > MOST_GATHERED_BYTES:
            return None
        self._rows.reverse()
        rows = [room[:size_bytes].view(own.dtype).view(own.shape) for room in self._rows[0]]
        rows[self._rank].copy_(own)
        self._gathered += 1
        self.write(GATHERED, self._gathered)
        self.wait(GATHERED, self._gathered)
        return torch.cat(rows)

    def start_maximum(self, value: int) -> Callable[[], int]:
        """Ask all ranks for the largest of their values; they ask the same questions in the same order."""
        self._questions += 1
        word, number = QUESTIONS + self._questions % QUESTIONS_KEPT, self._questions * VALUES
        self.write(word, number + value)

        def answered() -> int:
            self.wait(word, number)
            return max(value, *(self._words[rank * PAGE_BYTES // WORD_BYTES + word] % VALUES for rank in self._others))

        return answered


def opened_pids(pids: list[int]) -> list[int]:
    """Open all of these processes, or none."""
    with ExitStack() as opened:
        found: list[int] = []
        for pid in pids:
            found.append(os.pidfd_open(pid))
            opened.callback(os.close, found[-1])
        opened.pop_all()
    return found


def share(ranks: Ranks, room: int, timeout_seconds: int) -> SharedMemory | None:
    """Share memory with all other ranks, which are on this machine; None if that cannot be had. Every rank must call it."""
    whole = (PAGE_BYTES + room) * ranks.size
    if room * ranks.size > MOST_BYTES or platform.machine() != "x86_64":
        return None
    with ExitStack() as opened:
        path = ranks.broadcast_bytes(ranks.on_rank_zero(lambda: _made(whole, opened), "").encode()).decode()
        pids = ranks.gather_rows(torch.tensor([[os.getpid()]]), [1] * ranks.size).flatten().tolist()
        memory: SharedMemory | None = _opened(Path(path), whole, ranks, pids, timeout_seconds) if path else None
        # Nobody goes on before all have opened it.
        failed = ranks.start_logical_or(memory is None)()
    return None if failed else memory


def _opened(path: Path, size_bytes: int, ranks: Ranks, pids: list[int], timeout_seconds: int) -> SharedMemory | None:
    with _told(), path.open("r+b") as file:
        if NAME not in str(path.readlink()):
            # Process numbers of another container.
            raise OSError(f"{path} is another file")
        room = size_bytes // ranks.size - PAGE_BYTES
        return SharedMemory(ranks, mmap.mmap(file.fileno(), size_bytes), room, pids, collective_seconds(timeout_seconds))
    return None


def _made(size_bytes: int, opened: ExitStack) -> str:
    """Make memory that ends with the processes that have it open; return where the others find it meanwhile, "" if that cannot be."""
    with _told():
        number = os.memfd_create(NAME)
        opened.callback(os.close, number)
        # What is not there now would end a step by SIGBUS.
        os.posix_fallocate(number, 0, size_bytes)
        return f"/proc/{os.getpid()}/fd/{number}"
    return ""


@contextmanager
def _told() -> Generator[None]:
    """Log what this system cannot do; a Python that was built for old ones lacks functions."""
    try:
        yield
    except (OSError, AttributeError) as error:
        log.info("no memory is shared: %s", error)
