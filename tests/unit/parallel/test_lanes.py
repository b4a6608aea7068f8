"""The tree of lanes: one order of additions, whoever owns the lanes."""

import random

import torch

from pipeline.parallel.lanes import Lanes, TreeNode, fold, maximal_nodes, push
from pipeline.parallel.ordered import OrderedSum


def join(left: str, right: str) -> str:
    return f"({left}+{right})"


def tree(per_rank: list[int]) -> str:
    """The additions that ranks with these lanes make, written out: each rank its own nodes, then all nodes in order."""
    lanes = Lanes(per_rank, 0, sum(per_rank))
    whole: list[TreeNode[str]] = []
    for rank in range(len(per_rank)):
        own: list[TreeNode[str]] = []
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


def leaf(size: int, lane: int) -> torch.Tensor:
    """What one lane adds: values of very different sizes, so that the order of additions shows in the bits."""
    source = torch.Generator().manual_seed(1000 * size + lane)
    return torch.randn(size, generator=source) * 10 ** random.Random(lane).randint(-3, 3)


def ordered_sums(group, per_rank: list[int], sizes: list[int]) -> list[str]:
    lanes = Lanes(per_rank, group.rank, sum(per_rank))
    found = []
    for size in sizes:
        stack: list[TreeNode[torch.Tensor]] = []
        for lane in lanes.own:
            push(stack, (lane, 1, leaf(size, lane)), torch.Tensor.add)
        summed = OrderedSum(lanes)
        under_way = summed.scatter(stack, torch.empty(size))
        summed.gather(under_way)
        found.append(summed.result(under_way).numpy().tobytes().hex())
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
    """Fails if the leaves above are so tame that any order gives the same."""
    for lanes in (4, 6):
        values = [leaf(1001, lane) for lane in range(lanes)]
        from_left = values[0]
        for value in values[1:]:
            from_left = from_left + value
        stack: list[TreeNode[torch.Tensor]] = []
        for lane, value in enumerate(values):
            push(stack, (lane, 1, value), torch.Tensor.add)
        assert not torch.equal(from_left, fold(stack, torch.Tensor.add))
