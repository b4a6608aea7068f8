"""The tree of lanes: one order of additions, whoever owns the lanes."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.parallel.lanes import Lanes, Node, fold, maximal_nodes, push
from pipeline.parallel.ordered import OrderedSum


def join(left: str, right: str) -> str:
    return f"({left}+{right})"


def tree(per_rank: list[int]) -> str:
    """The additions that ranks with these lanes make, written out: each rank its own nodes, then all nodes in order."""
    lanes = Lanes(per_rank, 0, sum(per_rank))
    whole: list[Node[str]] = []
    for rank in range(len(per_rank)):
        own: list[Node[str]] = []
        for lane in lanes.of(rank):
            push(own, (lane, 1, str(lane)), join)
        assert [(start, size) for start, size, _ in own] == list(maximal_nodes(lanes.of(rank)))
        for node in own:
            push(whole, node, join)
    return fold(whole, join)


def test_eight_lanes_are_a_balanced_tree() -> None:
    assert tree([8]) == "(((0+1)+(2+3))+((4+5)+(6+7)))"


def test_six_lanes_end_with_the_larger_block_first() -> None:
    assert tree([6]) == "(((0+1)+(2+3))+(4+5))"


@given(st.lists(st.integers(min_value=1, max_value=9), min_size=1, max_size=7))
def test_ownership_does_not_change_one_addition(per_rank: list[int]) -> None:
    assert tree(per_rank) == tree([sum(per_rank)])


def ordered_sums(group, per_rank: list[int], sizes: list[int]) -> list[str]:
    lanes = Lanes(per_rank, group.rank, sum(per_rank))
    found = []
    for size in sizes:
        stack: list[Node[torch.Tensor]] = []
        for lane in lanes.own:
            source = torch.Generator().manual_seed(1000 * size + lane)
            push(stack, (lane, 1, torch.randn(size, generator=source) * 10 ** random.Random(lane).randint(-3, 3)), torch.Tensor.add)
        found.append(OrderedSum(lanes, group)(stack).numpy().tobytes().hex())
    return found


SIZES = [1, 2, 3, 7, 64, 1001]


SHARES = [[6], [3, 3], [1, 5], [2, 2, 2], [1, 2, 3], [4], [2, 2], [3, 1], [1, 1, 2]]


def test_ordered_sum_has_the_same_bits_on_any_ranks_and_for_any_size(run_ranks) -> None:
    results: dict[int, list[list[str]]] = {4: [], 6: []}
    for size in (1, 2, 3):
        shares = [share for share in SHARES if len(share) == size]
        for found in run_ranks(size, *((ordered_sums, (share, SIZES)) for share in shares)):
            for share, sums in zip(shares, found, strict=True):
                results[sum(share)].append(sums)
    assert [len(found) for found in results.values()] == [1 + 2 * 2 + 3, 1 + 2 * 2 + 2 * 3]
    for found in results.values():
        assert all(sums == found[0] for sums in found)


def test_a_plain_sum_would_not_have_the_same_bits() -> None:
    """Breaks if the values above are so tame that any order gives the same."""
    values = [torch.randn(1001, generator=torch.Generator().manual_seed(lane)) * 10 ** (lane % 4) for lane in range(6)]
    assert not torch.equal(((values[0] + values[1]) + values[2]) + values[3], (values[0] + values[1]) + (values[2] + values[3]))
