"""The tree of `ordered` in memory that ranks of one machine share, where they have its CPUs to themselves."""

import logging
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline import collectives
from pipeline.config import Dist
from pipeline.parallel.lane_buffers import changing, floating
from pipeline.parallel.lanes import Lanes, TreeNode, fold, maximal_nodes, push
from pipeline.parallel.ordered import Reduction
from pipeline.parallel.shared_memory import BUFFERS, GRADIENTS, MOST_GATHERED_BYTES, SharedMemory, share
from pipeline.ranks import Ranks

log = logging.getLogger(__name__)

# Of gradients and of buffers.
Sums = tuple[Reduction | None, Reduction | None]
ALIGNED_BYTES = 64


@dataclass
class _Sum:
    """A sum under way: which one it is, and where its nodes lie."""

    out: Tensor
    number: int
    place: slice
    done: bool = False


class SharedSum:
    """Sums flat tensors over all lanes of all ranks: each writes its nodes, and adds up everyone's.

    A step writes where the step before the last has written: whoever has written in the last one has read that. So a rank that has
    the last step's sums may write at once.
    """

    moves = 1

    def __init__(self, lanes: Lanes, memory: SharedMemory, word: int, size_bytes: int):
        self._nodes = [list(maximal_nodes(lanes.of(rank))) for rank in range(len(lanes.per_rank))]
        self._memory, self._rank = memory, lanes.rank
        most = max(map(len, self._nodes))
        # Two of them, in turn.
        self._rooms = [[room.view(most, -1) for room in memory.take(size_bytes // 2)] for _ in range(2)]
        self._word, self._written, self._under_way, self._end = word, 0, 0, 0

    def _next(self, out: Tensor) -> slice:
        """Where the next sum's nodes lie."""
        return slice(self._end, self._end + out.numel() * out.element_size())

    def memory_for(self, own: Tensor) -> Tensor:
        """This rank's room, which the others read only once `scatter` has said so."""
        alone = len(self._nodes[self._rank]) == 1
        return self._rooms[0][self._rank][0][self._next(own)].view(own.dtype) if alone else own

    def scatter(self, stack: list[TreeNode[Tensor]], out: Tensor) -> _Sum:
        """Show this rank's nodes to the others; the sum will be in `out`, which may be a node itself."""
        place, rooms = self._next(out), self._rooms[0][self._rank]
        self._end += _aligned(place.stop - place.start)
        assert self._end <= rooms.shape[1]
        for room, (_, _, value) in zip(rooms, stack, strict=False):
            shown = room[place].view(value.dtype)
            if shown.data_ptr() != value.data_ptr():
                shown.copy_(value)
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
        if not self._under_way:
            self._rooms.reverse()
            self._end = 0
        return under_way.out

    def _add_up(self, under_way: _Sum) -> None:
        out, to_add = under_way.out, sum(map(len, self._nodes)) - 1

        def add(one: Tensor, other: Tensor) -> Tensor:
            # Not in place: the others read it too.
            nonlocal to_add
            to_add -= 1
            return one + other if to_add else torch.add(one, other, out=out)

        tree: list[TreeNode[Tensor]] = []
        for rooms, nodes in zip(self._rooms[0], self._nodes, strict=True):
            for room, (start, size) in zip(rooms, nodes, strict=False):
                push(tree, (start, size, room[under_way.place].view(out.dtype)), add)
        fold(tree, add)
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
    memory = share(ranks, 2 * (MOST_GATHERED_BYTES + nodes * (of_gradients + of_buffers)), settings.timeout_seconds)
    if memory is None:
        return None
    log.info("gradients are summed in shared memory")
    ranks.shared = memory
    first = SharedSum(lanes, memory, GRADIENTS, 2 * nodes * of_gradients)
    return first, SharedSum(lanes, memory, BUFFERS, 2 * nodes * of_buffers)


def _size_bytes(tensors: list[Tensor]) -> int:
    """What tensors take at most, in however many pieces."""
    return sum(_aligned(one.numel() * one.element_size()) for one in tensors)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
