"""Layers that torch's own kernels train slowly on CPUs, and how they are computed there instead."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def replace_slow_kernels(model: nn.Module) -> None:
    """Let depthwise convolutions and average pools compute otherwise; the layers' types, names and weights stay."""
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1:
            # Within the layer's own forward, which others may replace.
            layer._conv_forward = partial(depthwise, layer, layer._conv_forward)  # pyright: ignore
        elif type(layer) is nn.AvgPool2d and (side := window_side(layer)):
            layer.forward = partial(average_pool, side)


def depthwise(layer: nn.Conv2d, compute: Callable[..., Tensor], images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Train in fp32 under autocast: oneDNN's bf16 kernels for the gradients take several times as long."""
    if not (layer.training and torch.is_autocast_enabled("cpu")):
        return compute(images, weight, bias)
    with torch.autocast("cpu", enabled=False):
        return compute(images.to(weight.dtype), weight, bias).to(torch.get_autocast_dtype("cpu"))


def window_side(pool: nn.AvgPool2d) -> int:
    """The side of a pool's windows, where they are square, side by side, and of a power of two; else 0."""
    side = pool.kernel_size if isinstance(pool.kernel_size, int) else 0
    plain = not pool.padding and not pool.ceil_mode and pool.divisor_override is None
    return side if plain and pool.stride in (side, (side, side)) and side & (side - 1) == 0 else 0


def average_pool(side: int, input: Tensor) -> Tensor:  # noqa: A002
    """AvgPool2d, whose own backward adds each gradient to zeros, pixel by pixel."""
    found: Tensor = AveragePool.apply(input, side) if input.ndim == 4 else F.avg_pool2d(input, side)  # pyright: ignore
    return found


class AveragePool(torch.autograd.Function):
    """Its backward copies each gradient's share over the window, to the same bits: to divide by a power of two is exact."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, side: int) -> Tensor:
        ctx.shape, ctx.side = images.shape[2:], side
        ctx.order = torch.channels_last if images.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        return F.avg_pool2d(images, side)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        # torch's own adds to zero, which makes 0 of -0.
        shares = (gradient / ctx.side**2 + 0.0).contiguous(memory_format=ctx.order)
        copies = torch.ops.aten.upsample_nearest2d(shares, ctx.shape, float(ctx.side), float(ctx.side))
        # Rows and columns that fill no window.
        for dimension, length in zip((2, 3), ctx.shape, strict=True):
            if rest := length % ctx.side:
                copies.narrow(dimension, length - rest, rest).zero_()
        return copies, None
