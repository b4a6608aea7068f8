"""Tensor parallelism: rows of each layer on every rank, the gradients of one process within rounding, and checkpoints for any strategy."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pipeline import parallel
from pipeline.config import Dist
from pipeline.parallel.lanes import Lanes, Task
from pipeline.training.state import State
from tests.ranks.test_strategies import BATCH, NATIVE_TOLERANCE, batch_of, make_model


def built(group: Any, name: str, strategy: str) -> tuple[Task, Lanes, State]:
    torch.use_deterministic_algorithms(True)
    model = make_model(name, group.device)
    task, lanes = Task(model, batch_of(12, group.device), 3, 0.1, nullcontext), Lanes([12 // group.size] * group.size, group.rank, BATCH)
    strategy = parallel.build(task, lanes, group, Dist.model_construct(strategy=strategy, reduction="native"))
    optimizer = torch.optim.SGD([*strategy.parameters.values()], lr=0.05, momentum=0.9)
    strategy.backward(0)
    optimizer.step()
    return task, lanes, State(model, optimizer, strategy)


def trained(group: Any, name: str, strategy: str) -> tuple[dict[str, torch.Tensor], int, list[list[float]]]:
    """All that a checkpoint has, how many numbers this rank holds of it, and the losses of its own lanes in a forward alone."""
    task, lanes, state = built(group, name, strategy)
    whole = {name: value.clone() for name, value in state.whole()}
    with torch.no_grad():
        losses = [task.forward(task.model, 5, lane)[1].tolist() for lane in lanes.own]
    return whole, sum(part.numel() for _, parameter, part in state.parts() if parameter is not None), losses


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet18"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_step_is_that_of_one_process_within_rounding(name: str, size: int, run_ranks) -> None:
    ((expected, everything, expected_losses),) = run_ranks(1, (trained, (name, "ddp")))[0]
    results = [result for (result,) in run_ranks(size, (trained, (name, "tensor")))]
    for found, held, _ in results:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert (found[key] - value).double().norm() <= NATIVE_TOLERANCE * value.double().norm(), key
        # Biases, BatchNorm and layers of fewer outputs than ranks are small.
        assert held < (1 / size + 0.1) * everything
    losses = [row for _, _, rows in results for row in rows]
    assert losses == [pytest.approx(row, rel=1e-3) for row in expected_losses]


def passed_on(group: Any, name: str) -> bool:
    """From rows to whole tensors, and from those to rows."""
    _, _, rows = built(group, name, "tensor")
    whole = {key: value.clone() for key, value in rows.whole()}
    _, _, replicas = built(group, name, "ddp")
    replicas.load(whole)
    after = dict(replicas.whole())
    with torch.no_grad():
        for _, _, part in rows.parts():
            part.zero_()
    rows.load(after)
    return all(torch.equal(value, whole[key]) and torch.equal(after[key], whole[key]) for key, value in rows.whole())


def test_a_checkpoint_of_rows_is_one_of_any_strategy(run_ranks) -> None:
    assert run_ranks(2, (passed_on, ("lenet",)), (passed_on, ("resnet18",))) == [[True, True]] * 2
