"""The ordered reduction level by level: first among neighbours, last among the farthest; fewer bytes between machines, the same tree.

Neighbours sum their part of the tree, each a slice of it, and every slice goes on to the ranks that hold the same slice of other parts.
So of gradients one sum leaves a machine instead of one for each of its ranks; BatchNorm's few statistics go to all at once. With two
ranks in every group it is a butterfly, which begins with neighbours: a rank sends 2 log2 n messages instead of 2 (n - 1).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch.distributed as dist
from torch import Tensor

from pipeline.config import Dist
from pipeline.parallel.lanes import Lanes, TreeNode
from pipeline.parallel.ordered import OrderedSum, Sum
from pipeline.ranks import Ranks
from pipeline.timeouts import collective_seconds

log = logging.getLogger(__name__)


@dataclass
class _Sums:
    """A sum under way on every level that it has reached, and how many moves it has made."""

    of_levels: list[Sum]
    moves: int = 1


class HierarchicalSum:
    """Sums flat tensors over all lanes, in two moves for each level: in to the farthest, and back."""

    def __init__(self, levels: list[OrderedSum]):
        self._levels, self.moves = levels, 2 * len(levels)

    def memory_for(self, own: Tensor) -> Tensor:
        """Messages are sent from anywhere."""
        return own

    def scatter(self, stack: list[TreeNode[Tensor]], out: Tensor) -> _Sums:
        """Start to send neighbours their slices; the sum will be in `out`, which may be a node itself."""
        return _Sums([self._levels[0].scatter(stack, out)])

    def advance(self, under_way: _Sums) -> None:
        """Finish the move before, and start the next one, if there is one."""
        sums, made = under_way.of_levels, under_way.moves
        if made < len(self._levels):
            own = self._levels[made - 1].share(sums[-1])
            sums.append(self._levels[made].scatter([(0, 1, own)], own))
        elif made == len(self._levels):
            self._levels[-1].gather(sums[-1])
        elif made < self.moves:
            level = self.moves - made - 1
            self._levels[level].collect(sums[level], self._levels[level + 1].result(sums[level + 1]))
        under_way.moves = min(made + 1, self.moves)

    def result(self, under_way: _Sums) -> Tensor:
        """The sum over all lanes, in `out`, once all moves are made."""
        return self._levels[0].result(under_way.of_levels[0])


def build(lanes: Lanes, ranks: Ranks, settings: Dist) -> OrderedSum | HierarchicalSum:
    """Return how ranks add up under `dist.algorithm`; every rank must call it."""
    # nccl was never seen with several communicators at once.
    algorithm = settings.algorithm or ("hierarchical" if dist.get_backend() == "gloo" else "flat")
    sizes = levels(lanes.per_rank, ranks.size // settings.nodes, algorithm)
    if len(sizes) == 1:
        # Of two ranks all are the same.
        if settings.algorithm in ("hierarchical", "butterfly") and ranks.size > 2:
            log.warning("dist.algorithm: %s does not go with lanes %s on these machines; flat is taken", settings.algorithm, lanes.per_rank)
        return OrderedSum(lanes)
    log.info("gradients are summed in levels of %s ranks", sizes)
    timeout = timedelta(seconds=collective_seconds(settings.timeout_seconds))
    sums: list[OrderedSum] = []
    for level, size in enumerate(sizes):
        # The ranks between two members of a group hold slices of the same part of the tree.
        apart = prod(sizes[:level])
        firsts = [first for first in range(ranks.size) if first % (apart * size) < apart]
        groups = [list(range(first, first + apart * size, apart)) for first in firsts]
        group = dist.new_subgroups_by_enumeration(groups, timeout=timeout)[0]
        assert isinstance(group, dist.ProcessGroup)
        (members,) = (one for one in groups if ranks.rank in one)
        owned = lanes.per_rank if level == 0 else [sum(lanes.per_rank[:apart])] * ranks.size
        sums.append(OrderedSum(Lanes([owned[rank] for rank in members], members.index(ranks.rank), lanes.global_batch), group))
    return HierarchicalSum(sums)


def levels(per_rank: Sequence[int], per_machine: int, algorithm: str) -> list[int]:
    """Return how many ranks a group has on each level, neighbours first; one level of all where lanes allow no other.

    The groups of a level must hold one block of the tree each, of the same size.
    """
    if algorithm == "flat":
        return [len(per_rank)]
    if algorithm != "butterfly":
        far = len(per_rank) // per_machine
        return [per_machine, far] if min(per_machine, far) > 1 and _blocks(per_rank, per_machine) else [len(per_rank)]
    found, apart = list[int](), 1
    while apart < len(per_rank):
        left = len(per_rank) // apart
        size = next(size for size in range(2, left + 1) if left % size == 0 and (size == left or _blocks(per_rank, apart * size)))
        found.append(size)
        apart *= size
    return found or [1]


def _blocks(per_rank: Sequence[int], ranks: int) -> bool:
    """Return whether so many neighbours hold equally large, aligned blocks of lanes everywhere."""
    sizes = {sum(per_rank[first : first + ranks]) for first in range(0, len(per_rank), ranks)}
    return len(sizes) == 1 and sizes.pop().bit_count() == 1
