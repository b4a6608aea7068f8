"""Under DDP lanes that are computed at once have the bits of ranks with a lane each."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import parallel
from pipeline.config import Dist
from pipeline.parallel.ddp import Ddp
from pipeline.parallel.lane_groups import TIMED_STEPS, same_bits
from pipeline.parallel.lanes import Lanes, Task
from pipeline.ranks import Ranks
from tests.unit.parallel.test_lane_groups import EXACT, IMAGES, alone, batch


def trained(group: Ranks, per_rank: list[int], model: nn.Module, **settings: Any) -> tuple[list[Tensor], list[list[range]]]:
    """Totals, gradients and buffers of some steps under DDP, and the groups."""
    model, lanes = copy.deepcopy(model), Lanes(per_rank, group.rank, IMAGES * sum(per_rank))
    strategy = parallel.build(Task(model, batch, 3, 0.1, nullcontext), lanes, group, Dist.model_construct(**settings))
    assert isinstance(strategy, Ddp)
    came: list[Tensor] = []
    for step in range(TIMED_STEPS + 2):
        totals = strategy.backward(step).over_ranks()
        came += [torch.tensor([*totals.values()]), *(one.grad.clone() for one in strategy.parameters.values() if one.grad is not None)]
        came += [one.clone() for one in model.buffers()]
    return came, [strategy._groups.of_step(step) for step in range(2)]


GROUPS = {
    (8,): [[range(8)]],
    (4, 4): [[range(4)], [range(4, 8)]],
    (1, 7): [[range(1)], [range(1, 2), range(2, 4), range(4, 8)]],
    (2, 3, 3): [[range(2)], [range(2, 4), range(4, 5)], [range(5, 6), range(6, 8)]],
}


# Ranks are threads here, which have one generator together.
@pytest.mark.parametrize("name", sorted(EXACT.keys() - {"dropout"}))
def test_under_ddp_all_ranks_have_the_bits_of_one_lane_after_another(name: str, thread_ranks: Callable[..., list[Any]]) -> None:
    model = EXACT[name]()
    expected = [came for came, _ in thread_ranks(8, trained, [1] * 8, model)]
    assert len(expected[0]) > 4
    for per_rank, groups in GROUPS.items():
        found = thread_ranks(len(per_rank), trained, list(per_rank), model)
        assert [cut for _, cut in found] == [[one] * 2 for one in groups]
        for came, _ in found:
            assert all(map(same_bits, expected[0], came))


@pytest.mark.parametrize(
    ("settings", "groups"),
    [({"accumulation": 2}, [range(2), range(2, 4)]), ({"find_unused_parameters": True}, alone(4)), ({"reduction": "native"}, alone(4))],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_settings_may_ask_for_less(settings: dict[str, Any], groups: list[range], thread_ranks: Callable[..., list[Any]]) -> None:
    ((_, found),) = thread_ranks(1, partial(trained, **settings), [4], EXACT["linear"]())
    assert found == [groups] * 2
