"""Convolutions after Winograd: what they compute, how exactly, and where."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import models
from pipeline.hardware import machine
from pipeline.models import winograd
from pipeline.models.cpu_layers import replace_kernels
from pipeline.parallel.layouts import keep_layouts

ORDERS = torch.channels_last, torch.contiguous_format
# Images, and what is added around them.
SHAPES = [((8, 8), (1, 1)), ((7, 9), (1, 1)), ((6, 5), (0, 0)), ((3, 5), (2, 1)), ((3, 3), (0, 1)), ((1, 2), (1, 4))]


@pytest.fixture(autouse=True)
def fast_fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "fast_fp32_products", lambda: True)


def ours(images: Tensor, weight: Tensor) -> Tensor:
    return winograd.convolve(images, weight, None, (1, 1))


def torchs(images: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(images, weight, padding=1)


def drawn(*shape: int, order: torch.memory_format = torch.channels_last, **kind: Any) -> Tensor:
    return torch.randn(shape, **kind).contiguous(memory_format=order).requires_grad_()


@pytest.mark.parametrize("at_once", [1, 6, 12, 1000])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("shape", "padding"), SHAPES, ids=str)
def test_it_is_a_convolution(
    shape: tuple[int, int], padding: tuple[int, int], order: torch.memory_format, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "TILES_AT_ONCE", at_once)
    torch.manual_seed(1)
    images, weight, bias = (drawn(*one, order=order, dtype=torch.float64) for one in ((5, 6, *shape), (8, 6, 3, 3), (8, 1, 1, 1)))
    found, expected = winograd.convolve(images, weight, bias.flatten(), padding), F.conv2d(images, weight, bias.flatten(), 1, padding)
    # As a layer behind it sends them: in plain order.
    gradient = torch.randn_like(expected).contiguous()
    gradients = (torch.autograd.grad(one, (images, weight, bias), gradient) for one in (found, expected))
    for own, other in zip((found, *next(gradients)), (expected, *next(gradients)), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


def test_gradients_of_gradients_are_right_and_those_beside_what_is_frozen() -> None:
    torch.manual_seed(2)
    images, weight = drawn(2, 3, 5, 4, dtype=torch.float64), drawn(2, 3, 3, 3, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(ours, (images, weight))
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda *leaves: winograd.convolve(*leaves, (1, 1)), (images, weight, bias))
    for wanted, found in ((images, ours(images, weight.detach())), (weight, ours(images.detach(), weight))):
        own, other = (torch.autograd.grad(one.square().sum(), wanted)[0] for one in (found, torchs(images, weight)))
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize(("channels", "side"), [(128, 14), (256, 7), (512, 4)])
def test_fp32_is_nearly_as_exact_as_torchs_own(channels: int, side: int) -> None:
    torch.manual_seed(3)
    images, weight = drawn(32, channels, side, side), drawn(channels, channels, 3, 3)
    gradient = torch.randn(images.shape)

    def all_of(found: Tensor, *leaves: Tensor) -> list[Tensor]:
        return [found, *torch.autograd.grad(found, leaves, gradient.to(found.dtype))]

    doubles = images.double(), weight.double()
    exact, own, other = (
        all_of(torchs(*doubles), *doubles),
        all_of(ours(images, weight), images, weight),
        all_of(torchs(images, weight), images, weight),
    )
    for right, *both in zip(exact, own, other, strict=True):
        errors = [((one - right).norm() / right.norm()).item() for one in both]
        assert errors[0] < min(1e-5, 20 * errors[1])


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"padding": (2, 1)}, (8, 64, 14, 15)),
        ({"padding": (0, 5), "bias": False}, (8, 64, 18, 6)),
        ({"padding": "same"}, (8, 64, 16, 12)),
        ({"padding": "valid"}, (8, 64, 14, 18)),
        ({"padding": 1}, (64, 28, 28)),
    ],
    ids=str,
)
def test_a_layer_computes_what_torchs_own_does(settings: dict[str, Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(6)
    layer = nn.Conv2d(64, 64, 3, **settings)
    replaced, images = copy.deepcopy(layer), drawn(*shape, order=torch.contiguous_format)
    replace_kernels(replaced)
    assert count(replaced, images) == 1
    found, expected = replaced(images), layer(images)
    gradient = torch.randn_like(expected)
    own, other = (
        [one, *torch.autograd.grad(one, [images, *of.parameters()], gradient)] for one, of in ((found, replaced), (expected, layer))
    )
    for one, another in zip(own, other, strict=True):
        assert (one - another).norm() < 1e-5 * another.norm()


@pytest.mark.parametrize("side", [12, 13])
def test_the_bits_do_not_depend_on_how_tensors_lie_in_memory(side: int) -> None:
    torch.manual_seed(4)
    images, weight = torch.randn(32, 64, side, side), torch.randn(128, 64, 3, 3)
    mean = torch.randn(32, 128, 1, 1).expand(32, 128, side, side)
    found: list[list[Tensor]] = []
    for orders in itertools.product(ORDERS, repeat=3):
        one, of, arriving = (each.contiguous(memory_format=order) for each, order in zip((images, weight, mean), orders, strict=True))
        for entering, gradient in itertools.product((one, torch.cat([one, one], 1)[:, :64]), (arriving, mean)):
            leaves = entering.detach().requires_grad_(), of.detach().requires_grad_(), torch.ones(128, requires_grad=True)
            made = winograd.convolve(*leaves, (1, 1))
            found.append([made, *torch.autograd.grad(made, leaves, gradient)])
            # The next layer's bits go by them, and DDP copies a gradient that lies otherwise than its bucket.
            assert all(each.is_contiguous(memory_format=torch.channels_last) for each in found[-1][:3])
            assert made._base is None
    for other in found[1:]:
        assert all(torch.equal(one, another) for one, another in zip(found[0], other, strict=True))


@pytest.mark.parametrize("side", [7, 8])
def test_lanes_at_once_have_the_bits_of_each_by_itself(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three images of a lane, and two.
    monkeypatch.setattr(winograd, "TILES_AT_ONCE", 12)
    torch.manual_seed(7)
    weight, bias = drawn(64, 64, 3, 3), torch.randn(64, requires_grad=True)
    images, gradient = drawn(10, 64, side, side), torch.randn(10, 64, side, side)

    def all_of(some: Tensor, arrived: Tensor, lanes: int) -> list[Tensor]:
        made = winograd.convolve(some, weight, bias, (1, 1), lanes)
        return [made, *torch.autograd.grad(made, (some, weight, bias), arrived)]

    found = all_of(images, gradient, 2)
    alone = [all_of(*two, 1) for two in zip(images.chunk(2), gradient.chunk(2), strict=True)]
    expected = [torch.cat(two) if number < 2 else sum(two) for number, two in enumerate(zip(*alone, strict=True))]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_fsdp_computes_alike() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))).to(memory_format=torch.channels_last)  # pyright: ignore
    replace_kernels(model)
    sharded, images = copy.deepcopy(model), torch.randn(4, 64, 12, 12)
    assert count(model, images) == 2
    keep_layouts(sharded)
    sharded.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    for one in (model, sharded):
        one(images).square().sum().backward()
    for own, other in zip(model.parameters(), sharded.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert torch.equal(own.grad, other.grad)


def count(model: nn.Module, images: Tensor, bf16: bool = False, of: str = "WinogradBackward") -> int:
    """How many of a model's layers compute so."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        todo, seen = [model(images).grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo.extend(one for one, _ in node.next_functions)
    return [type(one).__name__ for one in seen].count(of)


def test_resnets_layers_train_so_in_fp32_alone() -> None:
    model, images = models.build("resnet18", 1, 28, 10), torch.randn(32, 1, 28, 28)
    replace_kernels(model)
    # All of 3 by 3 but the three with strides.
    assert count(model, images) == 13
    # A few images have too few pixels of the last ones.
    assert count(model, images[:11]) == 10
    # Those on which strategies and placements are compared have the first ones, but on Zen 5.
    for number, side in ((12, 12), (6, 16), (24, 12)):
        assert count(model, torch.randn(number, 1, side, side)) >= 4
    assert not count(model, images, bf16=True)
    assert not count(model.double(), images.double())
    assert not count(model.float().eval().requires_grad_(False), images.requires_grad_())


def test_where_products_are_slow_only_windows_of_one_pixel_are_products_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "fast_fp32_products", lambda: False)
    model, images = models.build("resnet18", 1, 28, 10), torch.randn(32, 1, 28, 28)
    replace_kernels(model)
    assert not count(model, images)
    assert [count(model, images, bf16, "ByProductsBackward") for bf16 in (False, True)] == [1, 9]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(128, 128, 3, 2, 1),
        nn.Conv2d(128, 128, 3, padding=2, dilation=2),
        nn.Conv2d(128, 128, 3, padding=1, groups=2),
        nn.Conv2d(128, 48, 3, padding=1),
        nn.Conv2d(128, 128, (3, 1), padding=(1, 0)),
        nn.Conv2d(128, 128, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(128, 128, 3),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Conv2d(128, 128, 3, padding=30),
    ],
    ids=str,
)
def test_other_convolutions_stay_as_they_are(layer: nn.Conv2d) -> None:
    replace_kernels(layer)
    assert not count(layer, torch.randn(32, layer.in_channels, 8, 8))
