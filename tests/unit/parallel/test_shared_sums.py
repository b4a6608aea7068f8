"""Sums of gradients and buffers in memory that ranks share: the bits of one tree."""

import os
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import Dist
from pipeline.parallel import shared_sums
from pipeline.parallel.lanes import Lanes, TreeNode, push
from pipeline.parallel.ordered import add
from pipeline.ranks import Ranks
from tests.kit.skips import NOT_BOUND
from tests.ranks.test_strategies import with_strategy
from tests.unit.parallel.test_ordered import leaf, tree

pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason=NOT_BOUND)
SIZES = [1, 2, 3, 7, 64, 1001]
SHARES = [[1, 1], [4, 4], [1, 3], [1, 3, 2, 2], [2, 3, 3], [1] * 6]
STEPS = 5


def shared(group: Ranks, lanes: Lanes, dtype: torch.dtype = torch.float32) -> Any:
    """What sums gradients and buffers of some sizes."""
    group.bound = True
    model = nn.ParameterList([nn.Parameter(torch.empty(size, dtype=dtype)) for size in SIZES])
    found = shared_sums.build(model, lanes, group, Dist.model_construct())
    assert found is not None and group.shared is not None
    return found[0]


def summed(group: Ranks, per_rank: list[int], dtype: torch.dtype) -> list[list[Tensor]]:
    """The sums of some steps, which overlap as buckets do; now one rank is late and now another."""
    lanes = Lanes(per_rank, group.rank, sum(per_rank))
    reduction, steps = shared(group, lanes, dtype), []
    memory: Any = group.shared
    wait = memory.wait

    def late(word: int, value: int) -> None:
        wait(word, value)
        # The others go on meanwhile, and write again.
        time.sleep(0.002 * (value % group.size == group.rank))

    memory.wait = late
    for step in range(STEPS):
        under_way, outs = list[Any](), list[Tensor]()
        for size in SIZES:
            time.sleep(0.002 * ((step + size) % group.size == group.rank))
            stack: list[TreeNode[Tensor]] = []
            for lane in lanes.own:
                push(stack, (lane, 1, leaf(size, lane + step, dtype)), add)
            own = stack[-1][2]
            outs.append(own if size % 2 else torch.empty(size, dtype=dtype))
            node = reduction.memory_for(own)
            assert (node is own) == (len(stack) > 1), "one that is alone may be made where the others read it"
            stack[-1] = *stack[-1][:2], node.copy_(own) if step % 2 else own
            for one in under_way:
                reduction.advance(one)
            under_way.append(reduction.scatter(stack, outs[-1]))
        for one, out in zip(under_way, outs, strict=True):
            assert reduction.result(one) is out
        steps.append([out.clone() for out in outs])
    return steps


@pytest.mark.parametrize("per_rank", SHARES, ids=str)
def test_sums_have_the_bits_of_one_tree(per_rank: list[int], run_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for (steps,) in run_ranks(len(per_rank), (summed, (per_rank, dtype))):
            for step, sums in enumerate(steps):
                for size, total in zip(SIZES, sums, strict=True):
                    monkeypatch.setattr("tests.unit.parallel.test_ordered.leaf", lambda *at, by=step: leaf(at[0], at[1] + by, at[2]))
                    assert torch.equal(total, tree(size, sum(per_rank), dtype))
                    monkeypatch.undo()


def trained(group: Ranks, bound: bool, model: str, per_rank: list[int], accumulation: int = 1) -> str:
    group.bound, group.shared = bound, None
    digest, _, _ = with_strategy(group, "ddp", "ordered", model, per_rank, False, steps=3, accumulation=accumulation)
    assert (group.shared is not None) == bound
    return digest


@pytest.mark.parametrize("model", ["lenet", "torchvision:mobilenet_v3_small"])
def test_a_training_has_the_bits_of_one_that_sends_messages(model: str, run_ranks: Any) -> None:
    # BatchNorm's statistics too.
    digests = [
        one
        for per_rank in ([2, 2], [3, 1])
        for found in run_ranks(2, *((trained, (way, model, per_rank)) for way in (False, True)))
        for one in found
    ]
    assert len(set(digests)) == 1 and len(digests) == 8


@pytest.mark.parametrize("per_rank", [[4, 4], [3, 5]], ids=str)
def test_lanes_one_by_one_in_twos_and_at_once_have_the_same_bits(per_rank: list[int], run_ranks: Any) -> None:
    ways = [(way, "lenet", per_rank, accumulation) for way in (False, True) for accumulation in (1, 2, 4)]
    digests = [one for found in run_ranks(2, *((trained, way) for way in ways)) for one in found]
    assert len(set(digests)) == 1 and len(digests) == 12
