"""Layers that are computed otherwise on CPUs: what they compute."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pipeline.models import cpu_layers


def made() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1, groups=2))
    cpu_layers.train_faster(model)
    return model


def outputs(model: nn.Sequential, images: Tensor) -> list[Tensor]:
    """What every layer makes of what the one before has made, under autocast."""
    found = [images]
    with torch.autocast("cpu", torch.bfloat16):
        for layer in model:
            found.append(layer(found[-1]))
    return found[1:]


def test_depthwise_convolutions_alone_train_in_fp32_and_answer_in_bf16() -> None:
    model, images = made(), torch.randn(4, 3, 8, 8)
    found = outputs(model, images)
    assert [one.dtype for one in found] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert torch.equal(found[1], nn.functional.conv2d(found[0].float(), *model[1].parameters(), groups=8))
    with torch.no_grad():
        assert {one.dtype for one in outputs(model, images)} == {torch.bfloat16}


def test_gradients_of_depthwise_convolutions_are_those_of_fp32() -> None:
    layer, images = made()[1], torch.randn(4, 8, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(images).sum().backward()
    full = images.detach().float().requires_grad_()
    weight, bias = (one.detach().clone().requires_grad_() for one in layer.parameters())
    nn.functional.conv2d(full, weight, bias, groups=8).sum().backward()
    for own, other in zip([*layer.parameters(), images], [weight, bias, full], strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert torch.equal(own.grad, other.grad.to(own.dtype))


def test_a_copy_computes_with_its_own_weights() -> None:
    model, images = made(), torch.randn(4, 3, 8, 8)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not outputs(other, images)[1].any()
    assert outputs(model, images)[1].any()


def test_without_autocast_nothing_changes() -> None:
    model, images = made(), torch.randn(4, 3, 8, 8)
    plain = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1, groups=2))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(images), plain(images))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize(("side", "rows", "columns"), [(2, 8, 8), (2, 9, 7), (4, 11, 4), (1, 3, 3)])
def test_pools_to_means_have_the_bits_of_torchs_own(
    side: int, rows: int, columns: int, order: torch.memory_format, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    images = torch.randn(3, 5, rows, columns, dtype=dtype).contiguous(memory_format=order).requires_grad_()
    pool = nn.AvgPool2d(side)
    cpu_layers.train_faster(pool)
    found, expected = pool(images), nn.functional.avg_pool2d(images, side)
    assert torch.equal(found, expected)
    # As a layer behind them sends it, in plain order.
    gradient = torch.randn_like(expected).contiguous(memory_format=torch.contiguous_format)
    ours, theirs = (torch.autograd.grad(one, images, gradient)[0] for one in (found, expected))
    assert torch.equal(ours, theirs)
    assert ours.is_contiguous(memory_format=order)


@pytest.mark.parametrize(
    "pool",
    [nn.AvgPool2d(3), nn.AvgPool2d(2, 1), nn.AvgPool2d(2, padding=1), nn.AvgPool2d(2, ceil_mode=True), nn.AvgPool2d(2, divisor_override=3)],
    ids=str,
)
def test_other_pools_stay_torchs_own(pool: nn.AvgPool2d) -> None:
    cpu_layers.train_faster(pool)
    assert "forward" not in vars(pool)
