"""The ordered reduction level by level: the bits of the flat one, with fewer bytes between machines."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import Dist
from pipeline.parallel import hierarchy, mesh
from pipeline.parallel.hierarchy import levels
from pipeline.parallel.lanes import Lanes, TreeNode, push
from pipeline.parallel.ordered import OrderedSum, add
from pipeline.ranks import Ranks
from tests.unit.parallel.test_ordered import leaf, tree

SIZES = [1, 2, 3, 7, 64, 1001]


@pytest.mark.parametrize(
    ("per_rank", "per_machine", "algorithm", "expected"),
    [
        ([1] * 8, 8, "butterfly", [2, 2, 2]),
        ([1] * 6, 6, "butterfly", [2, 3]),
        ([1] * 3, 3, "butterfly", [3]),
        ([1], 1, "butterfly", [1]),
        # Blocks of four are equal, those of two ranks are not.
        ([1, 1, 2, 2, 1, 1], 6, "butterfly", [3, 2]),
        ([2, 3, 3], 3, "butterfly", [3]),
        # Equal blocks that are no powers of two stand at other places of the tree.
        ([3] * 4, 4, "butterfly", [4]),
        ([1] * 8, 4, "butterfly", [2, 2, 2]),
        ([1] * 8, 4, "hierarchical", [4, 2]),
        ([1] * 8, 4, "flat", [8]),
        ([1, 1, 2, 2, 1, 1], 3, "hierarchical", [3, 2]),
        ([2, 1, 1, 2], 2, "hierarchical", [4]),
        ([3, 3, 3, 3], 2, "hierarchical", [4]),
        # One rank a machine, or one machine.
        ([1] * 4, 1, "hierarchical", [4]),
        ([1] * 4, 4, "hierarchical", [4]),
    ],
)
def test_levels_are_as_many_as_the_lanes_of_ranks_and_machines_allow(
    per_rank: list[int], per_machine: int, algorithm: str, expected: list[int]
) -> None:
    assert levels(per_rank, per_machine, algorithm) == expected


def summed(group: Ranks, per_rank: list[int], nodes: int, algorithm: str, dtype: torch.dtype) -> list[Tensor]:
    """Sums that overlap, as the buckets of a step do: each is a move ahead of the next."""
    settings = Dist.model_construct(nodes=nodes, algorithm=algorithm, timeout_seconds=60)
    lanes = Lanes(per_rank, group.rank, sum(per_rank))
    reduction: Any = hierarchy.build(lanes, group, settings)
    under_way: list[Any] = []
    outs: list[Tensor] = []
    for size in SIZES:
        stack: list[TreeNode[Tensor]] = []
        for lane in lanes.own:
            push(stack, (lane, 1, leaf(size, lane, dtype)), add)
        # In a node of its own, or elsewhere.
        outs.append(stack[-1][2] if size % 2 else torch.empty(size, dtype=dtype))
        for one in under_way:
            reduction.advance(one)
        under_way.append(reduction.scatter(stack, outs[-1]))
    for _ in range(1, reduction.moves):
        for one in under_way:
            reduction.advance(one)
    for one, out in zip(under_way, outs, strict=True):
        # Once more is nothing.
        reduction.advance(one)
        assert reduction.result(one) is out
    return outs


WAYS = [("flat", 1), ("hierarchical", 2), ("hierarchical", 3), ("butterfly", 1)]
SHARES = [[4, 4], [1, 1, 1, 1], [1, 3, 2, 2], [2, 3, 3], [1] * 6, [1, 1, 2, 2, 1, 1], [1] * 8]


@pytest.mark.parametrize("per_rank", SHARES, ids=str)
def test_every_algorithm_has_the_bits_of_one_tree(per_rank: list[int], run_ranks: Any) -> None:
    ways = [(way, nodes, dtype) for way, nodes in WAYS if len(per_rank) % nodes == 0 for dtype in (torch.float32, torch.bfloat16)]
    for found in run_ranks(len(per_rank), *((summed, (per_rank, nodes, way, dtype)) for way, nodes, dtype in ways)):
        for (_, _, dtype), sums in zip(ways, found, strict=True):
            for size, total in zip(SIZES, sums, strict=True):
                assert total.dtype == dtype
                assert torch.equal(total, tree(size, sum(per_rank), dtype))


def sent_between_machines(group: Ranks, algorithm: str | None) -> int:
    """How many numbers a rank sends to those of the other of two machines, for a sum of 4,096."""
    settings, count = Dist.model_construct(nodes=2, algorithm=algorithm, timeout_seconds=60), 0
    lanes = Lanes([1] * 4, group.rank, 4)
    reduction: Any = hierarchy.build(lanes, group, settings)
    all_to_all, all_gather = dist.all_to_all_single, dist.all_gather_single

    def far(members: Any) -> int:
        ranks = range(4) if members is None else dist.get_process_group_ranks(members)
        return sum(rank // 2 != group.rank // 2 for rank in ranks)

    def scatter(out: Tensor, values: Tensor, to_here: Any, from_here: Any, members: Any, **options: Any) -> Any:
        nonlocal count
        count += far(members) * values.numel() // dist.get_world_size(members)
        return all_to_all(out, values, to_here, from_here, members, **options)

    def gather(out: Tensor, values: Tensor, members: Any, **options: Any) -> Any:
        nonlocal count
        count += far(members) * values.numel()
        return all_gather(out, values, members, **options)

    dist.all_to_all_single, dist.all_gather_single = scatter, gather
    try:
        under_way = reduction.scatter([(group.rank, 1, torch.ones(4096))], torch.empty(4096))
        for _ in range(1, reduction.moves):
            reduction.advance(under_way)
        assert torch.equal(reduction.result(under_way), torch.full((4096,), 4.0))
    finally:
        dist.all_to_all_single, dist.all_gather_single = all_to_all, all_gather
    return count


def test_a_machine_sends_one_sum_to_another_instead_of_one_for_each_rank(run_ranks: Any) -> None:
    for flat, hierarchical, null in run_ranks(4, *((sent_between_machines, (way,)) for way in ("flat", "hierarchical", None))):
        # A quarter of 4,096 to either of two ranks, and its own quarter back; against half of a half, there and back.
        assert (flat, hierarchical, null) == (2 * 1024 + 2 * 1024, 1024 + 1024, hierarchical)


def test_with_nccl_null_is_flat(monkeypatch: pytest.MonkeyPatch, alone: Ranks) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    four = replace(alone, size=4)
    assert isinstance(hierarchy.build(Lanes([1] * 4, 0, 4), four, Dist.model_construct(nodes=2)), OrderedSum)


@pytest.mark.parametrize(("per_rank", "warned"), [([1, 1], False), ([2, 3, 3], True)])
def test_an_algorithm_that_does_not_go_with_the_lanes_is_told(
    per_rank: list[int], warned: bool, alone: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, settings = replace(alone, size=len(per_rank)), Dist.model_construct(algorithm="butterfly")
    assert isinstance(hierarchy.build(Lanes(per_rank, 0, sum(per_rank)), ranks, settings), OrderedSum)
    assert ("dist.algorithm: butterfly does not go with lanes [2, 3, 3]" in caplog.text) == warned
    assert bool(caplog.records) == warned


def timeouts(group: Ranks) -> list[float]:
    """The timeout of every group that is made within the ranks."""
    settings, found, make = Dist.model_construct(nodes=2, replicas=2, timeout_seconds=5), list[float](), dist.new_subgroups_by_enumeration

    def made(ranks: Any, timeout: Any) -> Any:
        found.append(timeout.total_seconds())
        return make(ranks, timeout=timeout)

    dist.new_subgroups_by_enumeration = made
    try:
        hierarchy.build(Lanes([1] * 4, group.rank, 4), group, settings)
        mesh.groups(group, settings)
    finally:
        dist.new_subgroups_by_enumeration = make
    return found


def test_the_watchdog_is_earlier_than_the_timeout_of_a_group_within_the_ranks(run_ranks: Any) -> None:
    """Or a rank that waits would end in its collective, before the one that hangs is named."""
    assert run_ranks(4, (timeouts, ()))[0] == [[600.0] * 4]
