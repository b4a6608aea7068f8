"""A model cut into stages."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import models
from pipeline.config import ConfigError
from pipeline.models.cpu_layers import replace_kernels
from pipeline.parallel.messages import is_dense
from pipeline.parallel.stages import best_cuts, cut


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet18"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_stages_behind_one_another_are_the_model(name: str, count: int) -> None:
    model = models.build(name, 1, 28, 10).eval()
    stages, images = cut(model, count), torch.randn(2, 1, 28, 28)
    assert len(stages) == count
    value = images
    for stage in stages:
        value = stage(value)
    assert torch.equal(value, model(images))
    assert {id(one) for one in model.parameters()} == {id(one) for stage in stages for one in stage.parameters()}
    assert sum(1 for stage in stages for _ in stage.parameters()) == sum(1 for _ in model.parameters())


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [((1, 1, 1, 1), 2, [2]), ((5, 1, 1, 1), 2, [1]), ((0, 9, 3, 3, 3), 3, [2, 3]), ((1, 2, 3), 3, [1, 2]), ((7,), 1, [])],
)
def test_the_largest_stage_is_as_small_as_possible(sizes: tuple[int, ...], count: int, expected: list[int]) -> None:
    assert best_cuts(sizes, count) == expected


class Doubled(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:  # pyright: ignore
        return self._conv_forward(images, self.weight * 2, self.bias)


def test_a_stage_calls_convolutions_of_another_class_as_the_model_does() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), Doubled(16, 16, 3, padding=1))
    replace_kernels(model)
    (stage,), images = cut(model, 1), torch.randn(4, 3, 2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(stage(images), model(images))


class Asking(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return F.dropout(images, 0.5, self.training)


class Branching(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images if images.sum() > 0 else -images


def tied() -> nn.Module:
    first, between, last = nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)
    last.weight = first.weight
    return nn.Sequential(first, between, last)


class Idle(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        self.idle = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self[2](self[1](self[0](images)))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Asking, "which asks in its forward whether it is trained; set ddp"),
        (Branching, "which torch.fx cannot trace"),
        (lambda: nn.Linear(2, 2), "Linear can be cut in 0 places"),
        (Idle, "cannot train idle.weight, which takes no part in Idle's forward"),
        (tied, "of which two stages share a weight; set ddp"),
    ],
)
def test_what_cannot_be_cut_is_refused(build: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cut(build(), 2)


def test_a_tensor_is_dense_in_any_order_of_dimensions() -> None:
    one = torch.zeros(2, 3, 4, 4)
    for dense in (one, one.to(memory_format=torch.channels_last), one.permute(3, 1, 0, 2), torch.zeros(()), torch.zeros(1, 3)):
        assert is_dense(dense)
    for gap in (one[:, :2], one.expand(2, 3, 4, 4)[:, :, ::2], torch.zeros(1, 3).expand(2, 3)):
        assert not is_dense(gap)
