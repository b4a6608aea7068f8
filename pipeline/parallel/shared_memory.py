"""Ranks of one machine that have its CPUs to themselves: they add up in memory that they share, and ask each other there.

A message between them costs more than what it carries: whoever sleeps until it comes is woken late. Here a rank that waits looks again
and again for a moment, and then ever more seldom. What is computed is the tree of `ordered`.
"""

import logging
import mmap
import operator
import os
import platform
import select
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline import collectives
from pipeline.config import Dist
from pipeline.parallel.lane_buffers import changing, floating
from pipeline.parallel.lanes import Lanes, TreeNode, fold, maximal_nodes, push
from pipeline.parallel.ordered import Reduction
from pipeline.ranks import Ranks
from pipeline.timeouts import collective_seconds

# Of gradients and of buffers.
Sums = tuple[Reduction | None, Reduction | None]
log = logging.getLogger(__name__)

# Ranks that compute as much end most steps within this time; longer, the mirror would hardly get the CPU.
SPIN_SECONDS = 0.003
# Then a rank sleeps this share of the time that it has waited already, at most.
SLEEP_SHARE, SLEEP_SECONDS = 1 / 50, 0.02
# All that is shared. Beyond it messages take little of a step, and each rank would read much.
MOST_BYTES = 256 << 20
PAGE_BYTES, WORD_BYTES, ALIGNED_BYTES = 4096, 8, 64
# The words of a rank's page: how many sums of gradients and of buffers it has written, and its questions.
GRADIENTS, BUFFERS, QUESTIONS = 0, 16, 64
NAME = "lockstep-gradients"
# So many are under way at most, and a value is less than this.
QUESTIONS_KEPT, VALUES = 64, 256


class SharedMemory:
    """A page for each rank, which it alone writes, and room for what it adds. Each rank's CPU shows its writes in their order: x86 does."""

    def __init__(self, ranks: Ranks, mapped: mmap.mmap, room: int, pids: list[int], timeout_seconds: float):
        self._rank, self._size, self._timeout_seconds = ranks.rank, ranks.size, timeout_seconds
        self._words = memoryview(mapped).cast("q")
        content = torch.frombuffer(mapped, dtype=torch.uint8, offset=PAGE_BYTES * self._size)
        self._rooms, self._taken = content.view(self._size, room), 0
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


@dataclass
class _Sum:
    """A sum under way: which one it is, and where its nodes lie."""

    out: Tensor
    number: int
    place: slice
    done: bool = False


class SharedSum:
    """Sums flat tensors over all lanes of all ranks: each writes its nodes, and adds up everyone's.

    A step writes where the step before the last has written: whoever has written in the last one has read that.
    """

    moves = 1

    def __init__(self, lanes: Lanes, memory: SharedMemory, word: int, size_bytes: int):
        self._nodes = [list(maximal_nodes(lanes.of(rank))) for rank in range(len(lanes.per_rank))]
        self._memory, self._rank = memory, lanes.rank
        most = max(map(len, self._nodes))
        # Two of them, in turn.
        self._rooms = [[room.view(most, -1) for room in memory.take(size_bytes // 2)] for _ in range(2)]
        self._word, self._written, self._under_way, self._end = word, 0, 0, 0

    def scatter(self, stack: list[TreeNode[Tensor]], out: Tensor) -> _Sum:
        """Show this rank's nodes to the others; the sum will be in `out`, which may be a node itself."""
        if not self._under_way:
            self._rooms.reverse()
            self._end = 0
        size_bytes = out.numel() * out.element_size()
        place = slice(self._end, self._end + size_bytes)
        self._end += -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        rooms = self._rooms[0][self._rank]
        assert self._end <= rooms.shape[1]
        for room, (_, _, value) in zip(rooms, stack, strict=False):
            room[place].view(value.dtype).copy_(value)
        self._written, self._under_way = self._written + 1, self._under_way + 1
        self._memory.write(self._word, self._written)
        return _Sum(out, self._written, place)

    def advance(self, under_way: _Sum) -> None:
        """Add up, if all have come as far."""
        if not under_way.done and self._memory.are_at(self._word, under_way.number):
            self._add_up(under_way)

    def result(self, under_way: _Sum) -> Tensor:
        """The sum over all lanes, in `out`."""
        if not under_way.done:
            self._memory.wait(self._word, under_way.number)
            self._add_up(under_way)
        self._under_way -= 1
        return under_way.out

    def _add_up(self, under_way: _Sum) -> None:
        tree: list[TreeNode[Tensor]] = []
        for rooms, nodes in zip(self._rooms[0], self._nodes, strict=True):
            for room, (start, size) in zip(rooms, nodes, strict=False):
                # Not in place: the others read it too.
                push(tree, (start, size, room[under_way.place].view(under_way.out.dtype)), operator.add)
        under_way.out.copy_(fold(tree, operator.add))
        under_way.done = True


def build(model: nn.Module, lanes: Lanes, ranks: Ranks, settings: Dist) -> Sums | None:
    """Return how gradients and buffers are summed in shared memory; None where messages are to be sent. Every rank must call it."""
    on_one_machine = settings.nodes == 1 and int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == ranks.size
    # Ranks of an elastic job go on without each other.
    if ranks.size == 1 or not on_one_machine or settings.algorithm is not None or collectives.in_vain is not None:
        return None
    # One that could not be bound, as the kernel refused, is not to be waited for.
    if ranks.start_logical_or(not ranks.bound)():
        return None
    nodes = max(len(list(maximal_nodes(lanes.of(rank)))) for rank in range(ranks.size))
    of_gradients = _size_bytes([one for one in model.parameters() if one.requires_grad])
    of_buffers = _size_bytes([floating(changing(model))])
    memory = share(ranks, 2 * nodes * (of_gradients + of_buffers), settings.timeout_seconds)
    if memory is None:
        return None
    log.info("gradients are summed in shared memory")
    ranks.ask = memory.start_maximum
    first = SharedSum(lanes, memory, GRADIENTS, 2 * nodes * of_gradients)
    return first, SharedSum(lanes, memory, BUFFERS, 2 * nodes * of_buffers)


def _size_bytes(tensors: list[Tensor]) -> int:
    """What tensors take at most, in however many pieces."""
    return sum(-(-one.numel() * one.element_size() // ALIGNED_BYTES) * ALIGNED_BYTES for one in tensors)


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
