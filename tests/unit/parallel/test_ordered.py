"""The ordered reduction between ranks: the bits of one tree over the lanes, whoever owns them and whoever is late."""

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.heartbeat import COMPUTING, FORM, WAITING, Heartbeat
from pipeline.parallel.lanes import Lanes, Task, TreeNode, fold, push
from pipeline.parallel.layouts import _same_layout, flat
from pipeline.parallel.ordered import LaneGradients, OrderedSum, _sliced, add, add_lists
from pipeline.ranks import Ranks

SHARES = [[6], [3, 3], [1, 5], [2, 4], [2, 2, 2], [1, 2, 3], [4, 1, 1], [3, 1, 2]]
SIZES = [1, 2, 3, 6, 7, 64]


def leaf(size: int, lane: int, dtype: torch.dtype) -> Tensor:
    """Values of one lane, of other magnitudes than its neighbours', so that another order of additions has other bits."""
    return (torch.randn(size, generator=torch.Generator().manual_seed(100 * size + lane)) * 10.0 ** (lane % 4)).to(dtype)


def tree(size: int, lanes: int, dtype: torch.dtype) -> Tensor:
    stack: list[TreeNode[Tensor]] = []
    for lane in range(lanes):
        push(stack, (lane, 1, leaf(size, lane, dtype)), torch.Tensor.add)
    return fold(stack, torch.Tensor.add)


def together(group: Ranks, per_rank: list[int], dtype: torch.dtype) -> list[Tensor]:
    lanes = Lanes(per_rank, group.rank, sum(per_rank))
    summed, found = OrderedSum(lanes), []
    for size in SIZES:
        stack: list[TreeNode[Tensor]] = []
        for lane in lanes.own:
            push(stack, (lane, 1, leaf(size, lane, dtype)), torch.Tensor.add)
        # In a node of its own, or elsewhere.
        out = stack[-1][2] if size % 2 else torch.empty(size, dtype=dtype)
        under_way = summed.scatter(stack, out)
        summed.gather(under_way)
        assert summed.result(under_way) is out
        found.append(out)
    return found


def test_other_orders_of_these_values_have_other_bits() -> None:
    values = [leaf(64, lane, torch.float32) for lane in range(4)]
    assert not torch.equal(((values[0] + values[1]) + values[2]) + values[3], (values[0] + values[1]) + (values[2] + values[3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_sum_has_the_bits_of_one_tree_on_any_ranks(dtype: torch.dtype, thread_ranks: Callable[..., list[Any]]) -> None:
    for share in SHARES:
        for found in thread_ranks(len(share), together, share, dtype):
            for size, total in zip(SIZES, found, strict=True):
                assert total.dtype == dtype
                assert torch.equal(total, tree(size, 6, dtype))


def late(group: Ranks, at: str) -> Tensor:
    """Two sums that overlap; the last rank comes late, so whoever does not wait for it takes what is not there yet."""
    lanes = Lanes([1, 1, 1], group.rank, 3)
    summed = OrderedSum(lanes)
    if group.rank == 2 and at == "scatter":
        time.sleep(0.1)
    values = [leaf(60000, group.rank, torch.float32) for _ in range(2)]
    under_way = [summed.scatter([(group.rank, 1, value)], value) for value in values]
    if group.rank == 2 and at == "gather":
        time.sleep(0.1)
    for one in under_way:
        summed.gather(one)
    return torch.stack([summed.result(one) for one in under_way])


@pytest.mark.parametrize("at", ["scatter", "gather"])
def test_a_sum_waits_for_the_rank_that_is_late(at: str, thread_ranks: Callable[..., list[Any]]) -> None:
    expected = tree(60000, 3, torch.float32)
    for found in thread_ranks(3, late, at):
        assert torch.equal(found, torch.stack([expected, expected]))


def overlapped(group: Ranks) -> list[float]:
    """How long it takes to start either move, where the last rank starts it half a second later."""
    summed, value, seconds = OrderedSum(Lanes([1, 1, 1], group.rank, 3)), leaf(60000, group.rank, torch.float32), []

    def timed(move: Callable[[], Any]) -> Any:
        if group.rank == 2:
            time.sleep(0.5)
        started_at = time.monotonic()
        result = move()
        seconds.append(time.monotonic() - started_at)
        return result

    under_way = timed(lambda: summed.scatter([(group.rank, 1, value)], value))
    under_way.wait()
    timed(lambda: summed.gather(under_way))
    summed.result(under_way)
    return seconds


def test_nobody_waits_to_start_a_move(thread_ranks: Callable[..., list[Any]]) -> None:
    assert max(second for seconds in thread_ranks(3, overlapped)[:2] for second in seconds) < 0.25


def test_a_lone_rank_sends_nothing(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_to_all_single", "all_gather_single"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *_, **__: pytest.fail("it was sent"))
    for size, total in zip(SIZES, together(alone, [6], torch.float32), strict=True):
        assert torch.equal(total, tree(size, 6, torch.float32))


def moved(group: Ranks, size: int) -> tuple[int, int, int]:
    """How long a slice is, how many numbers this rank receives, and the size of the sum."""
    lanes = Lanes([2, 1, 3], group.rank, 6)
    summed = OrderedSum(lanes)
    stack: list[TreeNode[Tensor]] = []
    for lane in lanes.own:
        push(stack, (lane, 1, leaf(size, lane, torch.float32)), torch.Tensor.add)
    under_way = summed.scatter(stack, torch.empty(size))
    found = under_way.slices[0].numel(), sum(one.numel() for one in under_way.slices)
    summed.gather(under_way)
    return *found, summed.result(under_way).numel()


@pytest.mark.parametrize(("size", "piece"), [(6, 2), (7, 3), (1, 1)])
def test_no_more_is_sent_than_a_slice_of_every_node_to_every_rank(size: int, piece: int, thread_ranks: Callable[..., list[Any]]) -> None:
    """The nodes are lanes 0 and 1 together, 2, 3, and 4 and 5 together."""
    assert thread_ranks(3, moved, size) == [(piece, 4 * piece, size)] * 3


def test_tensors_are_cut_so_that_every_rank_finds_its_slices_together_with_zeros_at_the_end() -> None:
    first, second = torch.arange(1.0, 6), torch.arange(11.0, 16)
    assert _sliced([first, second], 3, 2).tolist() == [1, 2, 11, 12, 3, 4, 13, 14, 5, 0, 15, 0]
    assert _sliced([first, second], 5, 1).tolist() == [1, 11, 2, 12, 3, 13, 4, 14, 5, 15]
    assert _sliced([torch.ones(1), torch.ones(1)], 3, 1).tolist() == [1, 1, 0, 0, 0, 0]
    assert _sliced([first.double()], 2, 3).dtype == torch.float64


def test_additions_are_made_in_the_place_of_the_left_value() -> None:
    left, right = torch.ones(2), torch.full((2,), 2.0)
    assert add(left, right) is left
    assert left.tolist() == [3, 3]
    lefts, rights = [torch.ones(2), torch.zeros(1)], [torch.ones(2), torch.ones(1)]
    assert add_lists(lefts, rights) is lefts
    assert [value.tolist() for value in lefts] == [[2, 2], [1]]
    assert [value.tolist() for value in rights] == [[1, 1], [1]]


def test_gradients_lie_one_behind_the_other_in_the_memory_order_of_their_weights() -> None:
    weights = [torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last), torch.zeros(3)]
    of_weights, of_bias = torch.arange(24.0).view(2, 3, 2, 2), torch.tensor([30.0, 31, 32])
    in_order = of_weights.to(memory_format=torch.channels_last)
    expected = [*of_weights.permute(0, 2, 3, 1).flatten().tolist(), 30, 31, 32]
    for gradient in (of_weights, in_order):
        assert flat([gradient, of_bias], weights).tolist() == expected
    assert not weights[0].any()


def test_values_are_in_one_order_if_the_strides_of_all_dimensions_with_more_than_one_value_are_equal() -> None:
    for shape, same in (((4, 3, 1, 1), True), ((4, 3, 2, 2), False), ((1, 3, 2, 2), False), ((4, 1, 2, 2), True)):
        plain, other = torch.zeros(shape), torch.zeros(shape).to(memory_format=torch.channels_last)
        assert (_same_layout(plain, other), _same_layout(plain, plain.clone())) == (same, True)


def network() -> nn.Module:
    """Of more than one of DDP's buckets, with weights in channels-last order and one that does not learn."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 36, 600), nn.ReLU(), nn.Linear(600, 600), nn.Linear(600, 4)
    )
    model[4].bias.requires_grad_(False)
    return model.to(memory_format=torch.channels_last)


def task(model: nn.Module) -> Task:
    def batch(step: int, lane: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(100 * step + lane)
        return torch.randn(4, 3, 6, 6, generator=source) * 10.0**lane, torch.randint(4, (4,), generator=source)

    return Task(model, batch, 1, 0.0, nullcontext)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def trained(group: Ranks, per_rank: list[int], model: nn.Module, bucket_mb: float) -> tuple[list[list[Tensor]], set[tuple[str, int]]]:
    """The gradients of three steps, and what the heartbeat shows when a bucket is ready, and when another rank's is waited for."""
    group = replace(group, heartbeat=Heartbeat(None))
    model, lanes = copy.deepcopy(model), Lanes(per_rank, group.rank, 4 * sum(per_rank))
    parallel = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    kept = LaneGradients(lanes, group, [one for one in model.parameters() if one.requires_grad])
    parallel.register_comm_hook(None, kept.hook)
    found, phases = [], set()

    def watched(name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*words: Any) -> Any:
            phases.add((name, FORM.unpack(group.heartbeat._shown[: FORM.size])[3]))
            return move(*words)

        return observed

    kept._sum.scatter, kept._sum.gather = watched("scatter", kept._sum.scatter), watched("gather", kept._sum.gather)
    for step in range(3):
        model.zero_grad()
        group.heartbeat.computing(step)
        for lane in lanes.own:
            last = lane == lanes.own[-1]
            loss, _ = task(model).forward(parallel if last else model, step, lane)
            (loss * (1 / lanes.global_batch)).backward()
            if not last:
                kept.keep(lane)
        found.append(gradients(model))
        assert all(one.grad.stride() == one.stride() for one in model.parameters() if one.grad is not None)
    return found, phases


def by_hand(model: nn.Module, lanes: int, step: int) -> list[Tensor]:
    """The same gradients without DDP and without ranks: one lane after another, summed in the tree."""
    stack: list[TreeNode[list[Tensor]]] = []
    for lane in range(lanes):
        model.zero_grad()
        loss, _ = task(model).forward(model, step, lane)
        (loss * (1 / (4 * lanes))).backward()
        push(stack, (lane, 1, gradients(model)), lambda left, right: [a + b for a, b in zip(left, right, strict=True)])
    return fold(stack, lambda left, right: [a + b for a, b in zip(left, right, strict=True)])


@pytest.mark.parametrize("bucket_mb", [25, 0.1])
@pytest.mark.parametrize("per_rank", [[1], [6], [3, 1], [1, 2, 1]], ids=str)
def test_ddp_leaves_the_gradients_of_all_lanes_on_every_rank(
    per_rank: list[int], bucket_mb: float, thread_ranks: Callable[..., list[Any]]
) -> None:
    model = network()
    expected = [by_hand(copy.deepcopy(model), sum(per_rank), step) for step in range(3)]
    for found, phases in thread_ranks(len(per_rank), trained, per_rank, model, bucket_mb):
        for step in range(3):
            assert len(found[step]) == len(expected[step]) == 7
            for one, other in zip(found[step], expected[step], strict=True):
                assert torch.equal(one, other)
        assert phases == {("scatter", COMPUTING), ("gather", WAITING)}, "or a rank that all wait for could not be told from them"
