"""Layers that are computed otherwise on CPUs: what they compute."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.data import store
from pipeline.models.cpu_layers import replace_kernels
from pipeline.parallel.layouts import keep_layouts
from pipeline.training.work import build_model
from tests.kit.experiment import make_job

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
ORDERS = torch.channels_last, torch.contiguous_format
CPU = torch.device("cpu")


def made(replace: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1))
    if replace:
        replace_kernels(model)
    return model


def outputs(model: nn.Sequential, images: Tensor) -> list[Tensor]:
    """What every layer makes of what the one before has made, under autocast."""
    found = [images]
    with torch.autocast("cpu", torch.bfloat16):
        for layer in model:
            found.append(layer(found[-1]))
    return found


def test_convolutions_with_groups_train_in_fp32() -> None:
    images = torch.randn(4, 3, 8, 8)
    model = made()
    found = outputs(model, images)
    assert {one.dtype for one in found[1:]} == {torch.bfloat16}
    assert torch.equal(found[2], F.conv2d(found[1].float(), *model[1].parameters(), groups=8).bfloat16())
    others = outputs(made(replace=False), images)
    assert [torch.equal(one, other) for one, other in zip(found, others, strict=True)] == [True, True, False, False]
    # An evaluation has the bits of the published program, which knows nothing of this.
    with torch.inference_mode():
        pairs = zip(outputs(made().eval(), images), outputs(made(replace=False).eval(), images), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_gradients_of_depthwise_convolutions_are_those_of_fp32() -> None:
    layer, images = made()[1], torch.randn(4, 8, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(images).sum().backward()
    full = images.detach().float().requires_grad_()
    weight, bias = (one.detach().clone().requires_grad_() for one in layer.parameters())
    F.conv2d(full, weight, bias, groups=8).bfloat16().sum().backward()
    for own, other in zip([*layer.parameters(), images], [weight, bias, full], strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert torch.equal(own.grad, other.grad.to(own.dtype))


def test_fsdp_computes_depthwise_convolutions_alike() -> None:
    images = torch.randn(4, 3, 8, 8)
    alone, sharded = (made().to(memory_format=torch.channels_last) for _ in range(2))  # pyright: ignore
    keep_layouts(sharded)
    sharded.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    assert all(torch.equal(one, other) for one, other in zip(outputs(alone, images), outputs(sharded, images), strict=True))


def test_a_copy_computes_with_its_own_weights() -> None:
    model, images = made(), torch.randn(4, 3, 8, 8)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not outputs(other, images)[2].any()
    assert outputs(model, images)[2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_autocast_nothing_changes(dtype: torch.dtype) -> None:
    model, images = made().to(dtype), torch.randn(4, 3, 8, 8, dtype=dtype)
    assert torch.equal(model(images), made(replace=False).to(dtype)(images))


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("side", "rows", "columns"), [(2, 8, 8), (2, 9, 7), (4, 11, 4), (4, 4, 4), (1, 3, 3)])
def test_average_pools_have_the_bits_of_torchs_own(
    side: int, rows: int, columns: int, order: torch.memory_format, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    images = torch.randn(3, 5, rows, columns, dtype=dtype).contiguous(memory_format=order).requires_grad_()
    pool = nn.AvgPool2d(side)
    replace_kernels(pool)
    assert "forward" in vars(pool)
    found, expected = pool(images), F.avg_pool2d(images, side)
    assert torch.equal(found, expected)
    # As a layer behind them sends it: in plain order, and with zeros of both signs.
    gradient = torch.randn_like(expected).contiguous(memory_format=torch.contiguous_format)
    gradient[0], gradient[1] = 0.0, -0.0
    # The smallest ones, of which nothing is left.
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    gradient[2, :2] = torch.tensor([tiny, -tiny], dtype=dtype)[:, None, None]
    ours, theirs = (torch.autograd.grad(one, images, gradient)[0] for one in (found, expected))
    assert torch.equal(ours.view(BITS[dtype]), theirs.view(BITS[dtype]))
    assert ours.stride() == theirs.stride()


def test_an_average_pool_takes_one_image_too() -> None:
    pool = nn.AvgPool2d(2)
    replace_kernels(pool)
    image = torch.randn(3, 4, 4, requires_grad=True)
    assert torch.equal(pool(input=image), F.avg_pool2d(image, 2))
    pool(image).sum().backward()
    assert torch.equal(image.grad, torch.full((3, 4, 4), 0.25))


def test_compiled_average_pools_have_the_bits_of_eager_ones() -> None:
    pool = nn.AvgPool2d(2)
    replace_kernels(pool)
    torch.compiler.reset()
    compiled: Any = torch.compile(pool, backend="aot_eager", fullgraph=True)
    for rows, columns in ((8, 8), (9, 7), (5, 6)):
        images = torch.randn(3, 5, rows, columns, requires_grad=True)
        expected, found = (torch.autograd.grad(one(images).square().sum(), images) for one in (pool, compiled))
        assert all(map(torch.equal, expected, found))


def test_a_pool_whose_forward_was_replaced_keeps_it() -> None:
    pool = nn.AvgPool2d(2)
    pool.forward = torch.zeros_like  # pyright: ignore[reportAttributeAccessIssue]
    replace_kernels(pool)
    assert not pool(torch.ones(1, 1, 2, 2)).any()


class Padded(nn.AvgPool2d):
    def forward(self, images: Tensor) -> Tensor:  # pyright: ignore
        return super().forward(F.pad(images, (1, 1, 1, 1)))


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(3),
        nn.AvgPool2d(2, 1),
        nn.AvgPool2d(2, padding=1),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=3),
        Padded(2),
    ],
    ids=str,
)
def test_other_pools_stay_as_they_are(pool: nn.AvgPool2d) -> None:
    replace_kernels(pool)
    assert "forward" not in vars(pool)


def test_the_model_of_a_rank_computes_with_them(tmp_path: Path) -> None:
    job = make_job(tmp_path, model__name="lenet")
    model = build_model(job, store.read_manifest(job.prepared), CPU)
    made = model(torch.randn(2, 1, 28, 28)).grad_fn
    names: set[str] = set()
    while made is not None:
        names.add(type(made).__name__)
        made = next((one for one, _ in made.next_functions if one is not None and "Accumulate" not in type(one).__name__), None)
    assert {"AveragePoolBackward", "ReluBackward0"} < names
    assert "AvgPool2DBackward0" not in names
