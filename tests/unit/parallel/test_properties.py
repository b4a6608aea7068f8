"""What holds for any lanes, any ranks, any data and any settings: the tree, the order of samples, the shares."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from pipeline.config import Config, Dist
from pipeline.data.order import Order
from pipeline.parallel.lanes import Lanes, TreeNode, fold, maximal_nodes, push
from pipeline.parallel.ordered import _sliced, add

T = TypeVar("T")


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def split(draw: st.DrawFn, whole: int, parts: int, least: int) -> list[int]:
    """A whole number as so many numbers of at least `least`."""
    rest = whole - parts * least
    cuts = sorted(draw(st.lists(st.integers(0, rest), min_size=parts - 1, max_size=parts - 1)))
    return [stop - start + least for start, stop in zip([0, *cuts], [*cuts, rest], strict=True)]


@st.composite
def ownerships(draw: st.DrawFn) -> list[int]:
    """How many lanes every rank owns, of 1 to 64 in all."""
    lanes = draw(st.integers(1, 64))
    return split(draw, lanes, draw(st.integers(1, lanes)), 1)


def node_stacks(per_rank: list[int], leaf: Callable[[int], T], join: Callable[[T, T], T]) -> list[list[TreeNode[T]]]:
    """What every rank has added up alone."""
    stacks: list[list[TreeNode[T]]] = []
    for rank in range(len(per_rank)):
        stacks.append([])
        for lane in Lanes(per_rank, rank, sum(per_rank)).own:
            push(stacks[-1], (lane, 1, leaf(lane)), join)
    return stacks


def tree(stacks: list[list[TreeNode[T]]], join: Callable[[T, T], T]) -> T:
    whole: list[TreeNode[T]] = []
    for stack in stacks:
        for node in stack:
            push(whole, node, join)
    return fold(whole, join)


def balanced(start: int, count: int) -> object:
    """The tree as it is meant: of a power of two both halves, else the largest power of two and then what is left of it."""
    if count == 1:
        return start
    first = 1 << ((count - 1).bit_length() - 1)
    return balanced(start, first), balanced(start + first, count - first)


@given(ownerships())
def test_the_nodes_of_all_ranks_hold_every_lane_once_and_are_what_each_can_finish_alone(per_rank: list[int]) -> None:
    nodes = []
    for rank, stack in enumerate(node_stacks(per_rank, lambda lane: [lane], list.__add__)):
        own = Lanes(per_rank, rank, sum(per_rank)).own
        assert [(start, size) for start, size, _ in stack] == list(maximal_nodes(own))
        assert [lane for _, _, held in stack for lane in held] == list(own)
        nodes += stack
    assert [lane for _, _, held in nodes for lane in held] == list(range(sum(per_rank)))
    assert all(held == list(range(start, start + size)) and size & (size - 1) == 0 and start % size == 0 for start, size, held in nodes)


@given(ownerships())
def test_the_additions_depend_on_the_number_of_lanes_alone(per_rank: list[int]) -> None:
    def pair(left: object, right: object) -> object:
        return left, right

    assert tree(node_stacks(per_rank, lambda lane: lane, pair), pair) == balanced(0, sum(per_rank))


def moved_and_summed(per_rank: list[int], values: list[Tensor]) -> Tensor:
    """What the ordered sum gives, with the bytes moved by hand: every rank finishes the tree on its slice of all nodes."""
    stacks = node_stacks(per_rank, lambda lane: values[lane].clone(), add)
    ranks, numel = len(per_rank), values[0].numel()
    piece = -(-numel // ranks)
    sent = [_sliced([value for _, _, value in stack], ranks, piece).view(ranks, len(stack), piece) for stack in stacks]
    slices: list[Tensor] = []
    for rank in range(ranks):
        mine = [
            [(start, size, sent[sender][rank, index]) for index, (start, size, _) in enumerate(stacks[sender])] for sender in range(ranks)
        ]
        slices.append(tree(mine, add))
    return torch.cat(slices)[:numel]


@given(ownerships(), st.integers(1, 70), st.integers(0, 2**31))
def test_sums_of_floats_have_the_same_bits_whoever_owns_the_lanes(per_rank: list[int], numel: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    count = sum(per_rank)
    scales = 10.0 ** torch.randint(-3, 4, (count, 1), generator=source)
    values = list(torch.randn(count, numel, generator=source) * scales)
    alone = moved_and_summed([count], values)
    assert torch.equal(moved_and_summed(per_rank, values).view(torch.int32), alone.view(torch.int32))
    exact = torch.stack(values).double()
    # What n rounded additions can be off by; a lane left out is more than that.
    assert ((alone.double() - exact.sum(0)).abs() <= count * torch.finfo(torch.float32).eps * exact.abs().sum(0)).all()


@st.composite
def epochs(draw: st.DrawFn) -> dict[str, int]:
    """What an order is made of; all but the seed is small."""
    pieces, lane_size = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    count = pieces * lane_size + draw(st.integers(0, 400))
    return {"seed": draw(st.integers(0, 2**40)), "count": count, "global_batch": pieces * lane_size, "pieces": pieces}


def samples(order: Order, step: int, pieces: int) -> list[int]:
    """The global batch of a step."""
    return [sample for lane in range(pieces) for sample in order.lane(step, lane).tolist()]


@given(epochs(), st.integers(0, 50))
def test_an_epoch_takes_no_sample_twice_and_all_its_lanes_are_of_one_size(made: dict[str, int], epoch: int) -> None:
    order = Order(**made)
    assert order.steps_per_epoch == made["count"] // made["global_batch"]
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    assert {order.epoch(step) for step in steps} == {epoch}
    taken = [sample for step in steps for sample in samples(order, step, made["pieces"])]
    assert len(taken) == len(set(taken)) == order.steps_per_epoch * made["global_batch"]
    assert set(taken) <= set(range(made["count"]))
    sizes = {len(order.lane(step, lane)) for step in steps for lane in range(made["pieces"])}
    assert sizes == {made["global_batch"] // made["pieces"]}


@given(epochs(), st.integers(0, 1000), st.data())
def test_a_step_takes_the_same_samples_however_many_lanes_it_is_cut_into(made: dict[str, int], step: int, data: st.DataObject) -> None:
    other = data.draw(st.sampled_from(divisors(made["global_batch"])))
    assert samples(Order(**made), step, made["pieces"]) == samples(Order(**made | {"pieces": other}), step, other)


@given(epochs(), st.data())
def test_a_step_takes_the_same_samples_whatever_was_asked_before(made: dict[str, int], data: st.DataObject) -> None:
    order = Order(**made)
    steps = st.integers(0, 5 * order.steps_per_epoch)
    for step, lane in data.draw(st.lists(st.tuples(steps, st.integers(0, made["pieces"] - 1)), max_size=12)):
        assert order.lane(step, lane).tolist() == Order(**made).lane(step, lane).tolist()


@st.composite
def placements(draw: st.DrawFn, global_batch: int, lanes: int) -> dict[str, Any]:
    """Ranks, micro-batches and owners that one global batch of so many lanes can have."""
    world_size = draw(st.sampled_from([one for one in divisors(global_batch) if one <= lanes]))
    accumulation = draw(st.sampled_from([one for one in divisors(global_batch // world_size) if world_size * one <= lanes]))
    return {
        "world_size": world_size,
        "nodes": draw(st.sampled_from(divisors(world_size))),
        "backend": draw(st.sampled_from(["auto", "nccl", "gloo"])),
        "batch_size_per_gpu": global_batch // world_size // accumulation,
        "accumulation": accumulation,
        "lanes": lanes,
        "lanes_per_rank": split(draw, lanes, world_size, 1) if draw(st.booleans()) else None,
    }


@st.composite
def ordered_sections(draw: st.DrawFn) -> dict[str, Any]:
    global_batch = draw(st.integers(1, 256))
    return draw(placements(global_batch, draw(st.sampled_from(divisors(global_batch)))))


@given(ordered_sections(), st.booleans())
def test_the_shares_of_all_ranks_add_up_and_none_is_empty(values: dict[str, Any], native: bool) -> None:
    dist = Dist(**values | ({"reduction": "native", "lanes": None, "lanes_per_rank": None} if native else {}))
    assert len(dist.pieces_per_rank) == dist.world_size
    assert sum(dist.pieces_per_rank) == dist.pieces
    assert min(dist.pieces_per_rank) >= 1
    assert dist.images_per_step % dist.pieces == 0
    assert dist.images_per_step // dist.pieces <= dist.batch_size_per_gpu
    if dist.lanes_per_rank is None:
        assert max(dist.pieces_per_rank) - min(dist.pieces_per_rank) <= 1


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.integers(1, 48))
def test_lanes_are_taken_only_if_they_are_equal_and_none_is_larger_than_a_micro_batch(
    world_size: int, accumulation: int, batch_size: int, lanes: int
) -> None:
    values = {"world_size": world_size, "accumulation": accumulation, "batch_size_per_gpu": batch_size, "lanes": lanes}
    if world_size * accumulation <= lanes and world_size * accumulation * batch_size % lanes == 0:
        assert Dist(**values).images_per_step // lanes <= batch_size
    else:
        with pytest.raises(ValidationError, match="lanes"):
            Dist(**values)


@given(ordered_sections(), st.data())
def test_owners_are_taken_only_if_they_own_all_lanes_and_each_one_of_them(values: dict[str, Any], data: st.DataObject) -> None:
    parts, whole = (values[key] + data.draw(st.sampled_from([0, 0, 0, 1])) for key in ("world_size", "lanes"))
    own = split(data.draw, whole, parts, data.draw(st.sampled_from([1, 0, -1]))) if whole >= parts else [0] * parts
    if len(own) == values["world_size"] and sum(own) == values["lanes"] and min(own) >= 1:
        assert Dist(**values | {"lanes_per_rank": own}).pieces_per_rank == own
    else:
        with pytest.raises(ValidationError, match="lanes_per_rank"):
            Dist(**values | {"lanes_per_rank": own})


@given(st.integers(1, 256), st.data())
def test_ordered_training_is_the_same_experiment_on_any_ranks_and_another_one_with_other_lanes(
    global_batch: int, data: st.DataObject
) -> None:
    def identity(lanes: int) -> dict[str, Any]:
        dist = Dist(**data.draw(placements(global_batch, lanes)))
        return Config(dist=dist).identity("a cpu", "fp32", "gloo" if dist.backend == "auto" else dist.backend)

    lanes, other = (data.draw(st.sampled_from(divisors(global_batch))) for _ in range(2))
    assert identity(lanes) == identity(lanes)
    assert (identity(lanes) == identity(other)) == (lanes == other)
