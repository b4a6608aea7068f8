"""Tensor parallelism: rows of each layer on every rank, the gradients of one process within rounding, and checkpoints for any strategy."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.swin_transformer import SwinTransformer

from pipeline import parallel
from pipeline.config import Dist
from pipeline.parallel.lanes import Lanes, Task
from pipeline.training.state import State
from tests.ranks.test_strategies import BATCH, NATIVE_TOLERANCE, batch_of, make_model


class Windows(nn.Module):
    """A small Swin, whose attention computes with the weights of its layers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.swin = SwinTransformer([2, 2], 8, [2], [2], [2, 2], stochastic_depth_prob=0.0, num_classes=10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.swin(images.expand(-1, 3, -1, -1))


def in_place() -> nn.Module:
    """What VGG ends with: a layer that works in place on another's output."""
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.ReLU(inplace=True), nn.Linear(16, 10))


MODELS = ("mlp", "lenet", "resnet18")
OTHERS = {"windows": Windows, "in place": in_place}


def built(group: Any, name: str, strategy: str) -> tuple[Task, Lanes, State]:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    model = OTHERS[name]().double() if name in OTHERS else make_model(name, group.device, torch.float64)
    # Of the others a lane is one image.
    count = BATCH if name in OTHERS else 12
    task = Task(model, batch_of(count, group.device, torch.float64), 3, 0.1, nullcontext)
    lanes = Lanes([count // group.size] * group.size, group.rank, BATCH)
    strategy = parallel.build(task, lanes, group, Dist.model_construct(strategy=strategy, reduction="native"))
    optimizer = torch.optim.SGD([*strategy.parameters.values()], lr=0.05, momentum=0.9)
    strategy.backward(0)
    optimizer.step()
    return task, lanes, State(model, optimizer, strategy, group)


def trained(group: Any, name: str, strategy: str) -> tuple[dict[str, torch.Tensor], int, list[list[float]]]:
    """All that a checkpoint has, how many numbers this rank holds of it, and the losses of its own lanes in a forward alone."""
    task, lanes, state = built(group, name, strategy)
    whole = {name: value.clone() for name, value in state.whole()}
    with torch.no_grad():
        losses = [task.forward(task.model, 5, lane)[1]().tolist() for lane in lanes.own]
    return whole, sum(part.numel() for _, parameter, part in state.parts() if parameter is not None), losses


@pytest.fixture(scope="module")
def one_process(run_ranks) -> dict[str, Any]:
    """What each model comes to on one rank."""
    names = [*MODELS, *OTHERS]
    return dict(zip(names, run_ranks(1, *((trained, (name, "ddp")) for name in names))[0], strict=True))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_step_is_that_of_one_process_within_rounding(size: int, one_process: dict[str, Any], run_ranks) -> None:
    for name, results in zip(MODELS, zip(*run_ranks(size, *((trained, (name, "tensor")) for name in MODELS)), strict=True), strict=True):
        expected, everything, expected_losses = one_process[name]
        for found, held, _ in results:
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert (found[key] - value).double().norm() <= NATIVE_TOLERANCE * value.double().norm(), (name, key)
            # Biases, BatchNorm and layers of fewer outputs than ranks are small.
            assert held < (1 / size + 0.1) * everything
        losses = [row for _, _, rows in results for row in rows]
        assert losses == [pytest.approx(row, rel=NATIVE_TOLERANCE) for row in expected_losses], name


def test_layers_that_others_compute_with_or_work_in_place_on(one_process: dict[str, Any], run_ranks) -> None:
    for results in run_ranks(2, *((trained, (name, "tensor")) for name in OTHERS)):
        for name, (found, held, _) in zip(OTHERS, results, strict=True):
            expected, everything, _ = one_process[name]
            assert held < everything
            for key, value in expected.items():
                assert (found[key] - value).double().norm() <= NATIVE_TOLERANCE * value.double().norm(), (name, key)


def passed_on(group: Any, name: str) -> bool:
    """From rows to whole tensors, and from those to rows."""
    _, _, rows = built(group, name, "tensor")
    whole = {key: value.clone() for key, value in rows.whole()}
    _, _, replicas = built(group, name, "ddp")
    replicas.load(whole.items())
    after = dict(replicas.whole())
    with torch.no_grad():
        for _, _, part in rows.parts():
            part.zero_()
    rows.load(after.items())
    return all(torch.equal(value, whole[key]) and torch.equal(after[key], whole[key]) for key, value in rows.whole())


def test_a_checkpoint_of_rows_is_one_of_any_strategy(run_ranks) -> None:
    assert run_ranks(2, (passed_on, ("lenet",)), (passed_on, ("resnet18",))) == [[True, True]] * 2
