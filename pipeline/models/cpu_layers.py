"""Layers that torch's own kernels train slowly on CPUs, and how they are computed there instead."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Forward = Callable[[Tensor], Tensor]


def train_faster(model: nn.Module) -> None:
    """Give such layers another forward; their types, names and weights stay."""
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1:
            layer.forward = partial(depthwise, cast(Forward, layer.forward))  # pyright: ignore
        elif isinstance(layer, nn.AvgPool2d) and (side := window_side(layer)):
            layer.forward = partial(means, side)  # pyright: ignore


def depthwise(forward: Forward, images: Tensor) -> Tensor:
    """A depthwise convolution, in fp32 where gradients are wanted: in bf16 oneDNN takes several times as long for them."""
    if not (torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")):
        return forward(images)
    with torch.autocast("cpu", enabled=False):
        return forward(images.float())


def window_side(pool: nn.AvgPool2d) -> int:
    """The side of a pool's windows, where they are square, side by side, and of a power of two; else 0."""
    side = pool.kernel_size if isinstance(pool.kernel_size, int) else 0
    plain = not pool.padding and not pool.ceil_mode and pool.divisor_override is None
    return side if plain and pool.stride in (side, (side, side)) and side & (side - 1) == 0 else 0


def means(side: int, images: Tensor) -> Tensor:
    """The means over windows: torch's own backward adds to zeros, pixel by pixel, where these gradients are only spread."""
    found: Tensor = Means.apply(images, side)  # pyright: ignore
    return found


class Means(torch.autograd.Function):
    """AvgPool2d, to the same bits: to divide by a power of two is exact."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, side: int) -> Tensor:
        ctx.shape, ctx.side = images.shape[2:], side
        ctx.order = torch.channels_last if images.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        return F.avg_pool2d(images, side)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        shares = (gradient / ctx.side**2).contiguous(memory_format=ctx.order)
        spread = torch.ops.aten.upsample_nearest2d(shares, ctx.shape, float(ctx.side), float(ctx.side))
        # Rows and columns that fill no window.
        for dimension, length in zip((2, 3), ctx.shape, strict=True):
            if rest := length % ctx.side:
                spread.narrow(dimension, length - rest, rest).zero_()
        return spread, None
