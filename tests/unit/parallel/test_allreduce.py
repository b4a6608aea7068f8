"""All-reduce by hand: the ordered ones have the bits of the tree on any ranks, the ring of the books adds everything once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.parallel.allreduce import Naive, OrderedRing, Ring
from pipeline.parallel.lanes import Lanes, TreeNode, maximal_nodes, push
from pipeline.parallel.ordered import add
from pipeline.ranks import Ranks
from tests.unit.parallel.test_ordered import SHARES, SIZES, leaf, tree

LANES = 6


def stack_of(lanes: Lanes, size: int) -> list[TreeNode[Tensor]]:
    stack: list[TreeNode[Tensor]] = []
    for lane in lanes.own:
        push(stack, (lane, 1, leaf(size, lane, torch.float32)), add)
    return stack


def summed(group: Ranks, share: list[int], algorithm: str) -> list[Tensor]:
    nodes = [list(maximal_nodes(Lanes(share, 0, LANES).of(rank))) for rank in range(group.size)]
    one_each = [[(rank, 1)] for rank in range(group.size)]
    reduce = {
        "ordered ring": OrderedRing(group, nodes),
        "ordered, naive": Naive(group, nodes),
        "naive": Naive(group, one_each),
        "ring": Ring(group),
    }[algorithm]
    return [reduce(stack_of(Lanes(share, group.rank, LANES), size)) for size in SIZES]


@pytest.mark.parametrize("algorithm", ["ordered ring", "ordered, naive"])
def test_the_ordered_sum_has_the_bits_of_the_tree_on_any_ranks(algorithm: str, thread_ranks: Callable[..., list[Any]]) -> None:
    for share in SHARES:
        for found in thread_ranks(len(share), summed, share, algorithm):
            for size, total in zip(SIZES, found, strict=True):
                assert torch.equal(total, tree(size, LANES, torch.float32)), (share, size)


@pytest.mark.parametrize("algorithm", ["ring", "naive"])
def test_the_native_sum_is_the_same_on_every_rank_and_right_within_rounding(algorithm: str, thread_ranks: Callable[..., list[Any]]) -> None:
    other_bits = 0
    for share in SHARES:
        everyone = thread_ranks(len(share), summed, share, algorithm)
        for index, size in enumerate(SIZES):
            first, expected = everyone[0][index], tree(size, LANES, torch.float32)
            assert all(torch.equal(first, found[index]) for found in everyone)
            # Of values up to a thousand times as large as others.
            assert torch.allclose(first, expected, rtol=1e-5, atol=1e-3)
            other_bits += not torch.equal(first, expected)
    assert other_bits, "no order of additions differs from the tree's"
