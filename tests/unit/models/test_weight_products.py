"""Convolutions in fp32 whose weights' gradients are products of matrices: by rows of the window, and of images with one channel."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.data.store import read_manifest
from pipeline.hardware import machine
from pipeline.lanes_at_once import OfLanes, at_once
from pipeline.models import by_rows, one_channel, small_maps
from pipeline.models.cpu_layers import by_products, replace_kernels, shape_of
from pipeline.parallel.lanes import draws
from pipeline.training.work import build_model
from tests.kit.experiment import make_job
from tests.unit.models.test_small_maps import forms


@pytest.fixture(autouse=True)
def avx2_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "avx2_at_most", lambda: True)
    monkeypatch.setattr(machine, "fast_fp32_products", lambda: True)


# A layer, the side of its images, and what computes its weights' gradient.
LAYERS: dict[str, tuple[nn.Conv2d, int, Callable[..., OfLanes]]] = {
    "5 by 5": (nn.Conv2d(20, 50, 5), 13, by_rows.by_rows),
    "3 by 3 without bias": (nn.Conv2d(16, 48, 3, bias=False), 9, by_rows.by_rows),
    "2 by 6": (nn.Conv2d(8, 48, (2, 6)), 10, by_rows.by_rows),
    "a window as wide as images": (nn.Conv2d(4, 48, (3, 20)), 20, by_rows.by_rows),
    "one channel": (nn.Conv2d(1, 20, 3), 28, one_channel.by_image),
    "one channel, rows of 17": (nn.Conv2d(1, 17, 3, padding=1), 9, one_channel.by_image),
    "one channel with a border": (nn.Conv2d(1, 16, 3, padding=(2, 1)), 9, one_channel.by_image),
}


def layer_of(name: str) -> tuple[nn.Conv2d, Tensor, Callable[..., OfLanes]]:
    """A layer with its kernels, images, and what computes its weights' gradient."""
    torch.manual_seed(1)
    layer, side, products = LAYERS[name]
    layer = copy.deepcopy(layer).to(memory_format=torch.channels_last)  # pyright: ignore
    layer.reset_parameters()
    replace_kernels(layer)
    images = torch.randn(32, layer.in_channels, side, side).contiguous(memory_format=torch.channels_last)
    return layer, images, products


def products_of(found: Tensor) -> Callable[..., OfLanes] | None:
    """What computes the weights' gradient of a convolution, where it is one of the project's products."""
    return getattr(found.grad_fn, "compute", None)


def gradients(found: Tensor, leaves: list[Tensor], seed: int = 2) -> list[Tensor]:
    entering = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed)).to(found)
    return [found, *torch.autograd.grad(found, leaves, entering)]


@pytest.fixture(params=[1, 100_000, by_rows.BYTES_AT_ONCE])
def bytes_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (by_rows, one_channel):
        monkeypatch.setattr(one, "BYTES_AT_ONCE", request.param)


@pytest.mark.usefixtures("bytes_at_once")
@pytest.mark.parametrize("name", LAYERS)
def test_they_are_nearly_as_exact_as_torchs_own(name: str) -> None:
    layer, images, products = layer_of(name)
    plain, twice = nn.Conv2d._conv_forward, copy.deepcopy(layer).double()  # pyright: ignore[reportPrivateUsage]
    images.requires_grad_()
    found = layer(images)
    assert products_of(found) is products
    own = gradients(found, [images, *layer.parameters()])
    other = gradients(plain(layer, images, layer.weight, layer.bias), [images, *layer.parameters()])
    doubles = [images.detach().double().requires_grad_(), *twice.parameters()]
    exact = gradients(F.conv2d(*doubles, padding=layer.padding), doubles)
    for one, another, double in zip(own, other, exact, strict=True):
        assert (one - double).norm() <= 2 * (another - double).norm() + 1e-7 * double.norm()
    # DDP copies a gradient that lies otherwise than its bucket.
    assert all(one.stride() == of.stride() for one, of in zip(own[2:], layer.parameters(), strict=True))


@pytest.mark.usefixtures("bytes_at_once")
@pytest.mark.parametrize("name", LAYERS)
def test_the_bits_do_not_depend_on_how_images_and_gradients_lie_in_memory(name: str) -> None:
    layer, images, _ = layer_of(name)
    arrived = torch.randn(layer(images).shape)
    found: list[list[Tensor]] = []
    for own in forms(images):
        for entering in forms(arrived):
            leaf = own.detach().requires_grad_()
            made = layer(leaf)
            found.append([made, *torch.autograd.grad(made, [leaf, *layer.parameters()], entering)])
    for other in found[1:]:
        assert all(torch.equal(one, another) for one, another in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("bytes_at_once")
@pytest.mark.parametrize("name", LAYERS)
def test_lanes_at_once_have_the_bits_of_each_by_itself(name: str) -> None:
    layer, images, _ = layer_of(name)
    arrived = torch.randn(layer(images).shape).contiguous(memory_format=torch.channels_last)
    lanes = zip(images.chunk(4), arrived.chunk(4), strict=True)
    alone = [torch.autograd.grad(layer(some.clone()), list(layer.parameters()), one.clone()) for some, one in lanes]
    expected = [(first + second) + (third + fourth) for first, second, third, fourth in zip(*alone, strict=True)]
    with at_once([draws(images.device)] * 4):
        found = torch.autograd.grad(layer(images), list(layer.parameters()), arrived)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with at_once([draws(images.device)] * 4):
        recorded = torch.autograd.grad(layer(images), list(layer.parameters()), arrived, create_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(recorded, expected, strict=True))


def rows(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    shape = shape_of(images.shape[2:], weight.shape[2:], 1, 1, 0)  # pyright: ignore[reportArgumentType]
    return by_products(by_rows.by_rows, images, weight, bias, shape)


def grey(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    shape = shape_of(images.shape[2:], weight.shape[2:], 1, 1, (1, 0))  # pyright: ignore[reportArgumentType]
    return by_products(one_channel.by_image, images, weight, bias, shape)


@pytest.mark.usefixtures("bytes_at_once")
@pytest.mark.parametrize(("compute", "weight"), [(rows, (3, 2, 2, 3)), (grey, (3, 1, 3, 3))], ids=["rows", "grey"])
def test_gradients_of_gradients_are_right(compute: Callable[..., Tensor], weight: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    shapes = (2, weight[1], 4, 4), weight, weight[:1]
    leaves: Any = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradgradcheck(compute, leaves)
    plain, recorded = (torch.autograd.grad(compute(*leaves).square().sum(), leaves, create_graph=graph) for graph in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_frozen_layers_pass_gradients_on(name: str) -> None:
    layer, images, _ = layer_of(name)
    trained = torch.autograd.grad(layer(images).square().sum(), list(layer.parameters()))
    for parameter, whole in zip(layer.parameters(), trained, strict=True):
        torch.testing.assert_close(torch.autograd.grad(layer(images).square().sum(), parameter), (whole,))
    layer.requires_grad_(False)
    leaf = images.requires_grad_()
    plain = F.conv2d(leaf, layer.weight, layer.bias, padding=layer.padding)
    torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), leaf)[0] for one in (layer(leaf), plain)))
    leaf.requires_grad_(False)
    assert not layer(leaf).requires_grad


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", ["5 by 5", "one channel"])
def test_compiled_ones_have_the_bits_of_eager_ones(name: str) -> None:
    layer, images, _ = layer_of(name)
    torch.compiler.reset()
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    # From the second number of images on, torch compiles for others, too.
    for count in (32, 29, 7):
        some = images[:count].clone().requires_grad_()
        leaves = [some, *layer.parameters()]
        expected, found = (torch.autograd.grad(one(some).square().sum(), leaves) for one in (layer, compiled))
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("layer", "side", "products"),
    [
        (nn.Conv2d(1, 15, 3), 28, None),
        (nn.Conv2d(1, 20, 3, bias=False), 28, None),
        (nn.Conv2d(1, 20, 5), 28, None),
        (nn.Conv2d(2, 20, 3), 28, None),
        (nn.Conv2d(1, 20, 3, stride=2), 28, None),
        (nn.Conv2d(15, 48, 3), 12, None),
        (nn.Conv2d(16, 47, 3), 12, None),
        (nn.Conv2d(16, 48, 3, padding=1), 12, None),
        (nn.Conv2d(16, 48, 3, stride=2), 20, None),
        (nn.Conv2d(16, 48, 3), 16, by_rows.by_rows),
        (nn.Conv2d(16, 48, 3), 17, None),
        (nn.Conv2d(20, 50, 5), 9, by_rows.by_rows),
        (nn.Conv2d(48, 48, (1, 3)), 12, None),
    ],
)
def test_they_are_for_what_was_measured(layer: nn.Conv2d, side: int, products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_kernels(layer)
    images = torch.randn(8, layer.in_channels, side, side)
    assert products_of(layer(images[:7])) is None
    assert products_of(layer(images)) is products
    with at_once([draws(images.device)] * 2):
        assert products_of(layer(images)) is None
        assert products_of(layer(images.repeat(2, 1, 1, 1))) is products
    with torch.autocast("cpu", torch.bfloat16):
        assert products_of(layer(images)) is None
    monkeypatch.setattr(machine, "avx2_at_most", lambda: False)
    assert products_of(layer(images)) is None


def test_maps_of_few_pixels_keep_their_way() -> None:
    layer = nn.Conv2d(20, 50, 5)
    replace_kernels(layer)
    assert products_of(layer(torch.randn(8, 20, 8, 8))) is small_maps.by_window


@pytest.mark.parametrize("reduction", ["ordered", "native"])
def test_lenet_trains_so_but_not_as_a_plain_loop(reduction: str, tmp_path: Path) -> None:
    lanes = {} if reduction == "ordered" else {"dist__lanes": None}
    job = make_job(tmp_path, model__name="lenet", dist__reduction=reduction, **lanes)
    model = build_model(job, read_manifest(job.prepared), torch.device("cpu"))
    nodes: list[Any] = [model(torch.randn(8, 1, 28, 28)).grad_fn]
    torchs, products = 0, set[Any]()
    while nodes:
        node = nodes.pop()
        torchs += node.name() == "ConvolutionBackward0"
        products |= {node.compute} if hasattr(node, "compute") else set()
        nodes += [one for one, _ in node.next_functions if one is not None]
    assert (torchs, products) == ((0, {by_rows.by_rows, one_channel.by_image}) if reduction == "ordered" else (2, set()))
