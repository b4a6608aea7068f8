"""Data parallelism by hand: every rank has a copy of the model and takes its part of the batch, and gradients are summed by send and
receive alone.

`dist.algorithm` says how they travel. `naive`: all send theirs to rank 0, which adds them up and sends the sum back, so that its link
carries everything. `ring`: every rank talks to its two neighbours only, and all links carry the same. Under `reduction: ordered` lanes are
added up in the one tree that `ddp` uses, so both end in its bits. Under `native` the ring adds as an all-reduce of NCCL or gloo does:
each piece of the gradient is added up in another order, which the number of ranks changes.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import Dist
from pipeline.parallel.lanes import Lanes, Task, TreeNode, fold, maximal_nodes, push
from pipeline.parallel.ordered import add
from pipeline.parallel.replicas import Reduce, Replicas, flat_task
from pipeline.ranks import Ranks


def build(task: Task, lanes: Lanes, ranks: Ranks, settings: Dist) -> Replicas:
    """Replicas whose gradients are summed by hand."""
    own = flat_task(task, lanes)
    ordered = settings.reduction == "ordered"
    # The sums that each rank has when its own lanes are done.
    nodes = [list(maximal_nodes(lanes.of(rank))) if ordered else [(rank, 1)] for rank in range(ranks.size)]
    ring = OrderedRing(ranks, nodes) if ordered else Ring(ranks)
    reduce = Naive(ranks, nodes) if settings.algorithm == "naive" else ring
    return Replicas(own, lanes, ranks, own.lane, in_host_memory(reduce) if dist.get_backend() == "gloo" else reduce)


def in_host_memory(reduce: Reduce) -> Reduce:
    """The same where gloo, which sends and receives host memory alone, meets a GPU."""

    def moved(stack: list[TreeNode[Tensor]]) -> Tensor:
        device = stack[0][2].device
        return reduce([(start, size, value.cpu()) for start, size, value in stack]).to(device)

    return moved


def tree_sum(nodes: list[list[tuple[int, int]]], values: list[Tensor]) -> Tensor:
    """The sum of all ranks' nodes; `values` holds a row for each node of a rank."""
    stack: list[TreeNode[Tensor]] = []
    for own, rows in zip(nodes, values, strict=True):
        for (start, size), row in zip(own, rows, strict=True):
            push(stack, (start, size, row), add)
    return fold(stack, add)


class Naive:
    """Gather on rank 0, add, and broadcast: 2 (N - 1) tensors go over rank 0's link."""

    def __init__(self, ranks: Ranks, nodes: list[list[tuple[int, int]]]):
        self._ranks, self._nodes = ranks, nodes

    def __call__(self, stack: list[TreeNode[Tensor]]) -> Tensor:
        own = rows_of(stack, len(self._nodes[self._ranks.rank]))
        return self._ranks.on_rank_zero(lambda: self._collect, self._hand_over)(own)

    def _collect(self, own: Tensor) -> Tensor:
        everyone = [own]
        for rank in range(1, self._ranks.size):
            rows = own.new_empty(len(self._nodes[rank]), own.shape[1])
            dist.recv(rows, rank)
            everyone.append(rows)
        total = tree_sum(self._nodes, everyone)
        for rank in range(1, self._ranks.size):
            dist.send(total, rank)
        return total

    def _hand_over(self, own: Tensor) -> Tensor:
        dist.send(own, 0)
        total = torch.empty_like(own[0])
        dist.recv(total, 0)
        return total


class Ring:
    """The all-reduce of the books: each link carries 2 (N - 1) / N of one tensor, however many ranks there are."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def __call__(self, stack: list[TreeNode[Tensor]]) -> Tensor:
        own, size, rank = fold(stack, add), self._ranks.size, self._ranks.rank
        pieces = list(torch.nn.functional.pad(own, (0, -own.numel() % size)).view(size, -1))
        # Reduce-scatter: a piece goes around, and every rank adds its own part to it. Then rank r has all of piece r + 1.
        for turn in range(size - 1):
            arriving = (rank - turn - 1) % size
            pieces[arriving] = pieces[arriving] + around(self._ranks, pieces[(rank - turn) % size], pieces[arriving])
        # All-gather: the finished pieces go around.
        for turn in range(size - 1):
            arriving = (rank - turn) % size
            pieces[arriving] = around(self._ranks, pieces[(rank + 1 - turn) % size], pieces[arriving])
        return torch.cat(pieces)[: own.numel()]


class OrderedRing:
    """Every rank's sums go once around, unchanged, and each rank adds them up in the tree: N - 1 tensors over each link, for equal bits."""

    def __init__(self, ranks: Ranks, nodes: list[list[tuple[int, int]]]):
        self._ranks, self._nodes = ranks, nodes

    def __call__(self, stack: list[TreeNode[Tensor]]) -> Tensor:
        size, rank = self._ranks.size, self._ranks.rank
        width = stack[0][2].numel()
        everyone = [stack[0][2].new_empty(len(nodes), width) for nodes in self._nodes]
        everyone[rank] = rows_of(stack, len(self._nodes[rank]))
        for turn in range(size - 1):
            arriving = (rank - turn - 1) % size
            everyone[arriving] = around(self._ranks, everyone[(rank - turn) % size], everyone[arriving])
        return tree_sum(self._nodes, everyone)


def rows_of(stack: list[TreeNode[Tensor]], count: int) -> Tensor:
    """The sums of a rank as rows: one for each node of the tree, or all of them in one."""
    return torch.stack([value for _, _, value in stack] if len(stack) == count else [fold(stack, add)])


def around(ranks: Ranks, value: Tensor, like: Tensor) -> Tensor:
    """Send a tensor to the right and return what comes from the left, which has the shape of `like`."""
    arrived = torch.empty_like(like)
    right, left = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    # Both at once, or all would wait for one another.
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, value, right), dist.P2POp(dist.irecv, arrived, left)]):
        work.wait()
    return arrived
