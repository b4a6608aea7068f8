"""The ordered reduction where several ranks hold the same slice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.parallel.lanes import Lanes, TreeNode, push
from pipeline.parallel.ordered import OrderedSum
from pipeline.ranks import Ranks
from tests.unit.parallel.test_ordered import SIZES, leaf, tree


def own_slices(group: Ranks, per_rank: list[int], slices: int) -> list[Tensor]:
    lanes = Lanes(per_rank, group.rank, sum(per_rank))
    summed, found = OrderedSum(lanes, slices=slices), []
    for size in SIZES:
        stack: list[TreeNode[Tensor]] = []
        for lane in lanes.own:
            push(stack, (lane, 1, leaf(size, lane, torch.float32)), torch.Tensor.add)
        found.append(summed.share(summed.scatter(stack, stack[-1][2])))
    return found


@pytest.mark.parametrize(("share", "slices"), [([1, 2, 2, 1], 2), ([2, 2], 1), ([1, 1, 1, 1], 2), ([1, 1, 1, 1], 1), ([3, 1], 2)])
def test_where_there_are_fewer_slices_than_ranks_several_have_the_same(
    share: list[int], slices: int, thread_ranks: Callable[..., list[Any]]
) -> None:
    for rank, found in enumerate(thread_ranks(len(share), own_slices, share, slices)):
        for size, own in zip(SIZES, found, strict=True):
            piece = -(-size // slices)
            whole = torch.nn.functional.pad(tree(size, sum(share), torch.float32), (0, piece * slices - size))
            assert torch.equal(own, whole.split(piece)[rank % slices]), (rank, size)
