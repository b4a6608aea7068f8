"""Lanes that are computed at once come to the bits of one after another, or are not computed so."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torchvision.ops import StochasticDepth

from pipeline import lanes_at_once, models, order_of_sums
from pipeline.models.cpu_layers import replace_kernels
from pipeline.parallel.lane_buffers import LaneBuffers
from pipeline.parallel.lane_groups import MOST_PIXELS, TIMED_STEPS, TRIALS, LaneGroups, same_bits
from pipeline.parallel.lanes import Lanes, Task

IMAGES, SIDE = 4, 8


def batch(step: int, lane: int, images: int = IMAGES, side: int = SIDE, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Small whole numbers: sums of them are exact, in whichever order."""
    source = torch.Generator().manual_seed(100 * step + lane)
    drawn = torch.randint(-4, 5, (images, 1, side, side), generator=source).to(dtype)
    return drawn.contiguous(memory_format=torch.channels_last), torch.randint(10, (images,), generator=source)


def exact(*layers: nn.Module) -> nn.Module:
    """Layers whose weights are whole numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    for one in model.parameters():
        one.data = torch.randint(-3, 4, one.shape).to(one)
    replace_kernels(model)
    return model.to(memory_format=torch.channels_last)  # pyright: ignore


class Centred(nn.Module):
    """Images of a batch meet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE**2, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer((images - images.mean(0)).flatten(1))


class Tied(nn.Module):
    """One layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE**2, SIDE**2)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(self.layer(images.flatten(1)))[:, :10]


def begun(model: nn.Module, own: int = 4, most: int = 8, **changes: Any) -> LaneGroups:
    lanes = Lanes([own], 0, IMAGES * own)
    task = replace(Task(model, batch, 3, 0.1, nullcontext), **changes)
    return LaneGroups(task, lanes, LaneBuffers(model, lanes), 1 / lanes.global_batch, most, lambda: None)


def timed(groups: LaneGroups, *seconds: float) -> LaneGroups:
    """After the first steps."""
    assert groups.of_step(0) == groups._alone
    groups._seconds = list(seconds) or [0.0] * TIMED_STEPS
    return groups


def of(*words: Any, **changes: Any) -> LaneGroups:
    return timed(begun(*words, **changes))


def alone(lanes: int) -> list[range]:
    return [range(lane, lane + 1) for lane in range(lanes)]


def found(groups: LaneGroups, step: int, cut: list[range]) -> list[Tensor]:
    return groups._computed(step, cut).found


EXACT: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: exact(nn.Flatten(), nn.Linear(SIDE**2, 10)),
    "convolution": lambda: exact(nn.Conv2d(1, 10, 3, 2), nn.Flatten()),
    "convolution to small maps": lambda: exact(nn.Conv2d(1, 10, SIDE), nn.Flatten()),
    "dropout": lambda: exact(nn.Dropout(0.5), nn.Flatten(), nn.Linear(SIDE**2, 10)),
    "batch norm": lambda: exact(nn.BatchNorm2d(1), nn.Flatten()),
}


@pytest.mark.parametrize("name", EXACT)
def test_lanes_go_at_once_where_the_bits_are_equal(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """So they are on every CPU: nothing that is summed over pixels or channels is rounded."""
    groups = of(EXACT[name]())
    with caplog.at_level(logging.INFO):
        assert groups.of_step(0) == [range(4)]
    assert "4 lanes are computed at once" in caplog.text
    one_by_one, together = found(groups, 1, alone(4)), found(groups, 1, [range(4)])
    assert all(map(same_bits, one_by_one, together))
    assert any(not torch.equal(one, other) for one, other in zip(together, found(groups, 2, [range(4)]), strict=True))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["lenet", "mlp", "resnet18", "torchvision:mobilenet_v3_small", "torchvision:shufflenet_v2_x0_5"])
def test_models_come_to_the_same_but_for_rounding_on_any_cpu(name: str, bf16: bool) -> None:
    torch.manual_seed(1)
    model = models.build(name, 1, 16, 10).to(memory_format=torch.channels_last)  # pyright: ignore
    replace_kernels(model)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=bf16)
    groups = of(model, 2, batch=partial(batch, images=8, side=16), autocast=autocast)
    for one, other in zip(found(groups, 0, alone(2)), found(groups, 0, [range(2)]), strict=True):
        assert (one - other).norm() <= (0.05 if bf16 else 1e-4) * one.norm()
    before = [one.clone() for one in model.state_dict().values()]
    cut = groups.of_step(0)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert all(one.grad is None for one in model.parameters())
    for step in range(1, 8) if cut == [range(2)] else ():
        assert all(map(same_bits, found(groups, step, alone(2)), found(groups, step, cut)))


@pytest.mark.parametrize("name", ["lenet", "resnet18", "torchvision:mobilenet_v3_small"])
def test_kernels_that_sum_in_another_order_get_lane_after_lane(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name_of_probe in ("convolutions_alike", "gradients_alike", "products_alike", "gradients_of_rows_alike"):
        monkeypatch.setattr(order_of_sums, name_of_probe, lambda *_: False)
    torch.manual_seed(1)
    model = models.build(name, 1, 28, 10).to(memory_format=torch.channels_last)  # pyright: ignore
    replace_kernels(model)
    groups = of(model, batch=partial(batch, images=2, side=28))
    assert groups.of_step(0) == [range(4)]
    assert all(map(same_bits, found(groups, 1, alone(4)), found(groups, 1, [range(4)])))


def test_few_values_in_bf16_have_the_same_bits_in_many_steps() -> None:
    """Another order of sums shows in a step of hundreds there."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 128), nn.ReLU(), nn.Linear(128, 2))

    def few(step: int, lane: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(100 * step + lane)
        return torch.randn(16, 1, SIDE, SIDE, generator=source), torch.randint(2, (16,), generator=source)

    groups = of(model, batch=few, autocast=partial(torch.autocast, "cpu", torch.bfloat16))
    assert groups.of_step(0) == [range(4)]
    for step in range(500):
        assert all(map(same_bits, found(groups, step, alone(4)), found(groups, step, [range(4)]))), step


def test_where_images_meet_lanes_go_one_after_another(caplog: pytest.LogCaptureFixture) -> None:
    groups = of(exact(Centred()))
    with caplog.at_level(logging.INFO):
        assert [groups.of_step(step) for step in range(3)] == [alone(4)] * 3
    assert caplog.text.count("4 lanes are computed one after another") == 1


def test_gradients_of_zeros_tell_nothing() -> None:
    model = exact(nn.Flatten(), nn.Linear(SIDE**2, SIDE), nn.Linear(SIDE, 10))
    model[2].weight.data.zero_()  # pyright: ignore
    groups = of(model)
    assert groups.of_step(0) == alone(4)
    model[2].weight.data.fill_(1)  # pyright: ignore
    assert groups.of_step(1) == [range(4)]
    model[2].weight.data.zero_()  # pyright: ignore
    groups = of(model)
    assert [groups.of_step(step) for step in range(TRIALS)] == [alone(4)] * TRIALS
    model[2].weight.data.fill_(1)  # pyright: ignore
    assert groups.of_step(TRIALS) == alone(4)


def test_trials_end_also_where_there_are_several_groups() -> None:
    model = exact(nn.Flatten(), nn.Linear(SIDE**2, SIDE), nn.Linear(SIDE, 10))
    model[2].weight.data.zero_()  # pyright: ignore
    groups = of(model, 8, 2)
    assert [groups.of_step(step) for step in range(TRIALS)] == [alone(8)] * TRIALS
    assert groups._groups == alone(8)


def with_two_threads() -> LaneGroups:
    torch.set_num_threads(2)
    try:
        return of(EXACT["linear"]())
    finally:
        torch.set_num_threads(1)


REFUSED: dict[str, Callable[[], LaneGroups]] = {
    "lanes that are accumulated": lambda: of(EXACT["linear"](), most=1),
    "a model of the user's own": lambda: of(EXACT["linear"](), seeds_all=True),
    "a layer of another kind": lambda: of(exact(nn.Flatten(), nn.LayerNorm(SIDE**2), nn.Linear(SIDE**2, 10))),
    "statistics that are kept": lambda: of(exact(nn.BatchNorm2d(1).eval(), nn.Flatten(), nn.Linear(SIDE**2, 10))),
    "a layer that is used twice": lambda: of(exact(Tied())),
    "draws of other layers": lambda: of(exact(nn.Dropout2d(0.001), nn.Flatten(), nn.Linear(SIDE**2, 10))),
    "layers that no list has": lambda: of(exact(StochasticDepth(0.001, "row"), nn.Flatten(), nn.Linear(SIDE**2, 10))),
    "several threads": with_two_threads,
    "lanes of one image": lambda: of(EXACT["linear"](), batch=partial(batch, images=1)),
    "one lane": lambda: of(EXACT["linear"](), 1),
    "large images": lambda: of(EXACT["linear"](), batch=lambda *_: (torch.zeros(1, 1, 1, MOST_PIXELS // 2 + 1), torch.zeros(1).long())),
}


@pytest.mark.parametrize("why", REFUSED)
def test_else_lanes_go_one_after_another(why: str) -> None:
    groups = REFUSED[why]()
    assert groups.of_step(0) == alone(len(groups._own))


def test_groups_are_nodes_of_the_tree_and_no_larger_than_pays() -> None:
    model = EXACT["linear"]()
    lanes = Lanes([1, 7], 1, IMAGES * 8)
    task = Task(model, batch, 3, 0.0, nullcontext)
    groups = timed(LaneGroups(task, lanes, LaneBuffers(model, lanes), 1, 8, lambda: None))
    assert groups.of_step(0) == [range(1, 2), range(2, 4), range(4, 8)]
    assert of(model, most=3).of_step(0) == [range(2), range(2, 4)]
    side = (MOST_PIXELS // IMAGES // 2) ** 0.5
    model = exact(nn.MaxPool2d(int(side) // SIDE), nn.Flatten(), nn.Linear(SIDE**2, 10))
    assert of(model, batch=partial(batch, side=int(side))).of_step(0) == [range(2), range(2, 4)]


def test_a_model_goes_on_alone_and_its_copies_too() -> None:
    groups = of(EXACT["dropout"]())
    model = groups._task.model
    groups.of_step(0)
    average = AveragedModel(model)
    average.eval()
    images, _ = batch(0, 0)
    torch.manual_seed(3)
    expected = nn.functional.linear(images.flatten(1), model[2].weight, model[2].bias)  # pyright: ignore
    assert torch.equal(average(images), expected)
    with pytest.raises(RuntimeError), lanes_at_once.at_once([torch.get_rng_state()] * 2):
        model(torch.ones(2, 3))
    assert vars(lanes_at_once.under_way) == vars(lanes_at_once.UnderWay())


def test_lanes_whose_losses_overflow_together_have_the_gradients_of_each_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 10))
    # Smoothing adds up all classes of an image first.
    groups = begun(model, label_smoothing=0.0)
    largest = max(float(row[0]) for row in groups._computed(0, groups._alone).rows)
    for one in model.parameters():
        one.data *= 2e38 / largest
    alone, together = groups._computed(0, groups._alone), groups._computed(0, [range(4)])
    assert torch.stack(alone.rows)[:, 0].float().sum().isinf()
    assert all(one.isfinite().all() for one in alone.found)
    assert all(same_bits(*two) for two in zip(alone.found, together.found, strict=True))
