"""A pipeline: when a stage turns back, what its ranks hold of a checkpoint, its forward alone, and copies of it."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pipeline import parallel
from pipeline.config import Dist
from pipeline.parallel.lanes import Lanes, Task
from pipeline.parallel.pipeline import Pipeline
from pipeline.training.state import State
from tests.ranks.test_strategies import BATCH, CASES, batch_of, make_model, one_process, with_strategy


def turns(group: Any, strategy: str, per_rank: list[int]) -> list[str]:
    """What a stage does in a step: `f` is a lane's forward, `b` a backward."""
    patch, seen = pytest.MonkeyPatch(), list[str]()
    forward, backward = Pipeline._pass, Pipeline._differentiate

    def forwarding(self: Any, *rest: Any) -> Any:
        seen.append("f")
        return forward(self, *rest)

    def backwarding(self: Any, *rest: Any) -> Any:
        seen.append("b")
        return backward(self, *rest)

    with patch.context() as patched:
        patched.setattr(Pipeline, "_pass", forwarding)
        patched.setattr(Pipeline, "_differentiate", backwarding)
        with_strategy(group, strategy, "ordered", "mlp", per_rank, False, 1)
    return seen


def test_a_stage_turns_back_as_soon_as_a_gradient_can_be_there(run_ranks) -> None:
    """So that it keeps the activations of three lanes, of two, and of one; under GPipe of all six."""
    work = [(turns, (strategy, [2, 2, 2])) for strategy in ("pipeline", "pipeline gpipe")]
    found = [["".join(seen) for seen in stage] for stage in run_ranks(3, *work)]
    at_once = ["fff" + 3 * "bf" + "bbb", "ff" + 4 * "bf" + "bb", "f" + 5 * "bf" + "b"]
    assert found == [[line, 6 * "f" + 6 * "b"] for line in at_once]


def held(group: Any, strategy: str) -> dict[str, list[int]]:
    """The shapes of all that a checkpoint has, of a model whose first layer is frozen."""
    model = make_model("mlp", group.device)
    next(model.parameters()).requires_grad_(False)
    task = Task(model, batch_of(4, group.device), 3, 0.1, nullcontext)
    lanes = Lanes([4 // group.size] * group.size, group.rank, BATCH)
    built = parallel.build(task, lanes, group, Dist.model_construct(strategy=strategy))
    optimizer = torch.optim.AdamW([*built.parameters.values()])
    built.follow(optimizer)
    for step in range(2):
        built.backward(step)
        optimizer.step()
    return {name: list(value.shape) for name, value in State(model, optimizer, built, group).whole()}


def test_a_frozen_weight_has_no_momentum_on_any_rank(run_ranks) -> None:
    ((expected,),) = run_ranks(1, (held, ("ddp",)))
    assert run_ranks(2, (held, ("pipeline",))) == [[expected], [expected]]


def losses(group: Any, strategy: str) -> list[list[float]]:
    """Of this rank's lanes, with dropout, as a diagnosis asks for them."""
    model = make_model("mlp", group.device)
    task = Task(model, batch_of(4, group.device), 3, 0.1, nullcontext)
    lanes = Lanes([4 // group.size] * group.size, group.rank, BATCH)
    parallel.build(task, lanes, group, Dist.model_construct(strategy=strategy))
    return [task.forward(model, 5, lane)[1]().tolist() for lane in lanes.own]


def test_a_forward_alone_draws_what_it_draws_in_one_process(run_ranks) -> None:
    ((expected,),) = run_ranks(1, (losses, ("ddp",)))
    for size in (2, 4):
        assert [row for (rows,) in run_ranks(size, (losses, ("pipeline",))) for row in rows] == expected


def test_copies_may_take_unequal_numbers_of_lanes(run_ranks) -> None:
    """Four lanes on the first two ranks, and two on the others."""
    for name, bf16 in CASES[:2]:
        expected, _, totals = one_process(name, 6, bf16)
        for ((found, _, found_totals),) in run_ranks(4, (with_strategy, ("pipeline x 2", "ordered", name, [2, 2, 1, 1], bf16))):
            assert (found, found_totals) == (expected, totals), name


def test_maps_of_one_pixel_have_the_bits_of_one_process(run_ranks) -> None:
    """With residuals and BatchNorm: kernels choose by strides, which say nothing where a size is 1."""
    name = "torchvision:mobilenet_v3_small"
    for bf16, placed in ((False, [("pipeline", [2, 2]), ("pipeline", [1, 1, 2]), ("fsdp", [2, 2])]), (True, [("pipeline", [1, 1, 1, 1])])):
        expected, _, totals = one_process(name, 4, bf16)
        for strategy, per_rank in placed:
            for ((found, _, found_totals),) in run_ranks(len(per_rank), (with_strategy, (strategy, "ordered", name, per_rank, bf16))):
                assert (found, found_totals) == (expected, totals), (strategy, per_rank)
