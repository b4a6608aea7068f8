"""Convolutions to maps of few pixels on CPUs: what they compute, and that it has one set of bits."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.hardware import machine
from pipeline.models import cpu_layers, small_maps
from pipeline.models.cpu_layers import replace_kernels
from pipeline.parallel.layouts import keep_layouts


@pytest.fixture(autouse=True)
def fast_fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "fast_fp32_products", lambda: True)


@pytest.fixture(params=["by_place", "by_window"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    by_place = request.param == "by_place"
    monkeypatch.setattr(cpu_layers, "MANY_WEIGHTS", 1 if by_place else sys.maxsize)
    monkeypatch.delattr(small_maps, "by_window" if by_place else "by_place")


SMALL: dict[str, tuple[nn.Conv2d, tuple[int, int]]] = {
    "3 by 3": (nn.Conv2d(6, 8, 3, padding=1), (4, 4)),
    "with strides": (nn.Conv2d(6, 8, 3, 2, 1), (7, 8)),
    "with different strides and borders": (nn.Conv2d(6, 8, (5, 2), (2, 1), (2, 0)), (5, 6)),
    "points with strides": (nn.Conv2d(6, 8, 1, 2), (7, 7)),
    "points": (nn.Conv2d(6, 8, 1), (2, 3)),
    "points with a border": (nn.Conv2d(6, 8, 1, padding=1), (1, 2)),
    "to one pixel": (nn.Conv2d(6, 8, 4), (4, 4)),
    "without bias": (nn.Conv2d(6, 8, 3, padding=1, bias=False), (3, 3)),
    "seen by a part of the window": (nn.Conv2d(6, 8, (5, 4), (3, 1), (3, 2)), (2, 1)),
    "points without bias": (nn.Conv2d(6, 8, 1, bias=False), (1, 1)),
}


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_convolutions_to_small_maps_compute_what_torchs_own_do(name: str, order: torch.memory_format) -> None:
    torch.manual_seed(1)
    layer, shape = SMALL[name]
    layer = copy.deepcopy(layer).double().to(memory_format=order)  # pyright: ignore
    ours = copy.deepcopy(layer)
    replace_kernels(ours)
    entering = torch.randn(5, 6, *shape, dtype=torch.float64).contiguous(memory_format=order)
    own, other = (entering.clone().requires_grad_() for _ in range(2))
    found, expected = ours(own), layer(other)
    assert type(found.grad_fn) is not type(expected.grad_fn)
    # As a layer behind it sends them: in plain order.
    gradient = torch.randn_like(expected).contiguous()
    found.backward(gradient)
    expected.backward(gradient)
    for one, another in zip([found, own.grad, *grads(ours)], [expected, other.grad, *grads(layer)], strict=True):
        torch.testing.assert_close(one, another, rtol=1e-10, atol=1e-10)
    # DDP copies a gradient that lies otherwise than its bucket.
    assert order != torch.channels_last or ours.weight.grad.stride() == ours.weight.stride()


def grads(layer: nn.Module) -> list[Tensor | None]:
    return [one.grad for one in layer.parameters()]


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("name", SMALL)
def test_small_maps_in_bf16_are_near_to_fp32(name: str) -> None:
    """torch's own is no measure: it may hold numbers that nothing computed."""
    torch.manual_seed(2)
    layer, shape = SMALL[name]
    layer, images = copy.deepcopy(layer), torch.randn(64, 6, *shape)
    ours = copy.deepcopy(layer)
    replace_kernels(ours)
    gradients: list[list[Tensor]] = []
    for one, enabled in ((ours, True), (layer, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = one(images)
        assert found.dtype == (torch.bfloat16 if enabled else torch.float32)
        entering = torch.randn(found.shape, generator=torch.Generator().manual_seed(3)).to(found.dtype)
        gradients.append(list(torch.autograd.grad(found, list(one.parameters()), entering)))
    for own, full in zip(*gradients, strict=True):
        assert own.dtype == torch.float32
        assert (own - full).norm() < 0.01 * full.norm()


def forms(of: Tensor) -> list[Tensor]:
    """The same values in every order that layers hand them on in, and in memory that begins anywhere."""
    last = of.contiguous(memory_format=torch.channels_last)
    return [last, of.contiguous(), torch.cat([last, last], 1)[:, : of.shape[1]], torch.cat([last[:1], last])[1:]]


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("window", [1, 3])
def test_the_bits_do_not_depend_on_how_images_and_gradients_lie_in_memory(window: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    layer = nn.Conv2d(33, 40, window, padding=window // 2).to(dtype).to(memory_format=torch.channels_last)  # pyright: ignore
    replace_kernels(layer)
    images, mean = torch.randn(24, 33, *shape, dtype=dtype), torch.randn(24, 40, 1, 1, dtype=dtype).expand(24, 40, *shape)
    for gradients in ([mean, *forms(mean)], forms(torch.randn(24, 40, *shape, dtype=dtype))):
        found: list[list[Tensor]] = []
        for own in forms(images):
            for entering in gradients:
                leaf = own.detach().requires_grad_()
                made = layer(leaf)
                found.append([made, *torch.autograd.grad(made, [leaf, *layer.parameters()], entering)])
        for other in found[1:]:
            assert all(torch.equal(one, another) for one, another in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("both_ways")
def test_small_maps_of_no_images_and_in_double_precision_are_torchs() -> None:
    for window in (1, 3):
        layer = nn.Conv2d(6, 8, window, padding=window // 2)
        replace_kernels(layer)
        layer(torch.randn(0, 6, 4, 4)).sum().backward()
        assert not any(one.grad.any() for one in layer.parameters() if one.grad is not None)
        assert layer.weight.grad is not None
    for layer in (nn.Conv2d(6, 8, 1), nn.Conv2d(6, 8, 3), nn.Conv2d(6, 8, 3, groups=2)):
        replace_kernels(layer.double())
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(5, 6, 4, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.usefixtures("both_ways")
def test_gradients_of_gradients_are_right() -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1)
    replace_kernels(layer.double())
    leaves = torch.randn(2, 2, 2, 3, dtype=torch.float64, requires_grad=True), *layer.parameters()
    assert torch.autograd.gradgradcheck(layer._conv_forward, leaves)  # pyright: ignore[reportPrivateUsage]
    plain, recorded = (torch.autograd.grad(layer(leaves[0]).square().sum(), leaves, create_graph=graph) for graph in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.usefixtures("both_ways")
def test_compiled_small_maps_have_the_bits_of_eager_ones() -> None:
    torch.manual_seed(6)
    layer, images = nn.Conv2d(6, 8, 3, padding=1).to(memory_format=torch.channels_last), torch.randn(5, 6, 4, 4)  # pyright: ignore
    replace_kernels(layer)
    torch.compiler.reset()
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    # From the second number of images on, torch compiles for any.
    for count in (5, 3):
        some = images[:count].clone().requires_grad_()
        leaves = [some, *layer.parameters()]
        with torch.autocast("cpu", torch.bfloat16):
            expected, found = (torch.autograd.grad(one(some).float().square().sum(), leaves) for one in (layer, compiled))
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("channels", "window", "side", "bf16", "ours"),
    [
        (256, 3, 14, True, True),
        (256, 3, 14, False, False),
        (255, 3, 14, True, False),
        (256, 1, 14, True, False),
        (256, 3, 15, True, False),
    ],
)
def test_maps_of_49_pixels_are_small_in_bf16_where_weights_are_many(channels: int, window: int, side: int, bf16: bool, ours: bool) -> None:
    layer = nn.Conv2d(128, channels, window, 2, window // 2)
    replace_kernels(layer)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        found = layer(torch.randn(2, 128, side, side))
    assert (found.grad_fn.name() == "ByProductsBackward") == ours


def test_larger_maps_and_evaluations_keep_torchs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_layers, "by_products")
    layer, images = nn.Conv2d(6, 8, 3, padding=1), torch.randn(5, 6, 5, 5)
    expected = torch.autograd.grad(layer(images).square().sum(), layer.weight)[0]
    replace_kernels(layer)
    assert torch.equal(torch.autograd.grad(layer(images).square().sum(), layer.weight)[0], expected)
    layer, images = nn.Conv2d(33, 40, 1).eval(), torch.randn(24, 33, 4, 4)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(images)
        replace_kernels(layer)
        assert torch.equal(layer(images), expected)


def test_what_is_set_after_a_layer_was_made_counts() -> None:
    images, layers = torch.randn(5, 6, 4, 4), [nn.Conv2d(6, 8, 3) for _ in range(5)]
    layers[0].padding = "same"
    layers[1].padding = (1,)  # pyright: ignore[reportAttributeAccessIssue]
    layers[2].padding, layers[2].dilation = 2, (2,)  # pyright: ignore[reportAttributeAccessIssue]
    layers[3].padding = "valid"
    layers[4].padding, layers[4].stride = [1, 1], [2, 1]  # pyright: ignore[reportAttributeAccessIssue]
    for layer in layers:
        expected = layer(images)
        replace_kernels(layer)
        torch.testing.assert_close(layer(images), expected)


def in_a_circle(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv2d(F.pad(images, (1, 1, 1, 1), mode="circular"), weight, bias)


def test_a_layer_that_was_made_to_compute_otherwise_goes_on_to() -> None:
    layer, images = nn.Conv2d(6, 8, 3, padding=1), torch.randn(5, 6, 4, 4)
    layer._conv_forward = in_a_circle  # pyright: ignore[reportAttributeAccessIssue]
    replace_kernels(layer)
    assert torch.equal(layer(images), in_a_circle(images, *layer.parameters()))


def test_one_image_by_itself_trains_as_in_a_batch() -> None:
    layer, image = nn.Conv2d(16, 32, 3, 2, padding=1), torch.randn(16, 2, 2)
    replace_kernels(layer)
    found = layer(image)
    assert found.grad_fn.next_functions[0][0].name() == layer(image[None]).grad_fn.name() == "ByProductsBackward"
    alone, batch = (torch.autograd.grad(one.square().sum(), layer.weight)[0] for one in (found, layer(image[None])))
    assert torch.equal(alone, batch)


def test_small_maps_of_frozen_layers_pass_gradients_on() -> None:
    layer, images = nn.Conv2d(6, 8, 3, padding=1).requires_grad_(False), torch.randn(5, 6, 4, 4, requires_grad=True)
    expected = torch.autograd.grad(layer(images).square().sum(), images)[0]
    replace_kernels(layer)
    assert torch.equal(torch.autograd.grad(layer(images).square().sum(), images)[0], expected)
    assert not layer(images.detach()).requires_grad


def test_fsdp_computes_small_maps_alike() -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 4, 1)).to(memory_format=torch.channels_last)  # pyright: ignore
    replace_kernels(model)
    sharded, images = copy.deepcopy(model), torch.randn(5, 6, 4, 4)
    keep_layouts(sharded)
    sharded.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    for one in (model, sharded):
        one(images).square().sum().backward()
    for own, other in zip(grads(model), grads(sharded), strict=True):
        assert own is not None
        assert other is not None
        assert torch.equal(own, other)
