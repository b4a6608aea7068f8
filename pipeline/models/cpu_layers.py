"""Layers that torch's own kernels train slowly or wrongly on CPUs, and how they are computed there instead."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import lanes_at_once
from pipeline.hardware import machine
from pipeline.lanes_at_once import OfLanes, under_way
from pipeline.models import by_rows, one_channel, small_maps, winograd

# For so few pixels oneDNN's calls cost more than their arithmetic; it seems to pass over the whole gradient of the weights for every image.
FEW_PIXELS = 16
# Channels that leave times those that enter: so many make a product of matrices for each place in the window worth its call. In bf16 that
# is faster than oneDNN for more pixels, too.
MANY_WEIGHTS, FEW_FOR_MANY_WEIGHTS = 128 * 256, 49
# In a lane, for products with AVX2: one of fewer that is computed alone takes longer with them.
FEWEST_IMAGES = 8
OWN_OF_TORCH = nn.Conv2d._conv_forward  # pyright: ignore[reportPrivateUsage]
Pair = tuple[int, int]
Compute = Callable[..., Tensor]
Setting = int | tuple[int, ...]


def replace_kernels(model: nn.Module, weights_by_products: bool = True) -> None:
    """Let convolutions and average pools compute otherwise where that is faster, or right; the layers' types, names and weights stay.

    Without `weights_by_products` those stay torch's that would change on CPUs with AVX2 alone.
    """
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            # Within the layer's own forward, which others may replace.
            layer._conv_forward = partial(convolve, layer, layer._conv_forward, weights_by_products)  # pyright: ignore
        elif type(layer) is nn.AvgPool2d and "forward" not in vars(layer) and (side := window_side(layer)):
            layer.forward = partial(average_pool, side)


def convolve(layer: Any, compute: Compute, products: bool, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
    """Train as is fastest for maps of that size on this kind of CPU; and in fp32 where oneDNN's bf16 is slow or wrong."""
    # Weights of a layer in eval mode may get gradients, too.
    trains = layer.training or (torch.is_grad_enabled() and weight.requires_grad)
    if not (trains and input.is_floating_point() and input.ndim in (3, 4)):
        return compute(input, weight, bias)
    torchs = getattr(compute, "__func__", None) is OWN_OF_TORCH and layer.padding_mode == "zeros"
    if under_way.lanes > 1:
        compute = partial(lanes_at_once.convolve, layer)
    if torchs and input.ndim == 3:
        return convolve(layer, compute, products, input[None], weight, bias)[0]
    settings = (tuple(one) if isinstance(one, list) else one for one in (layer.stride, layer.dilation, layer.padding))
    shape = shape_of(input.shape[-2:], weight.shape[-2:], *settings)
    plain = torchs and shape.plain and layer.groups == 1
    full = {one.dtype for one in (input, weight, bias) if one is not None} == {torch.float32} and not torch.is_autocast_enabled("cpu")
    # For windows of one pixel they pay anyway.
    products_pay = not full or machine.fast_fp32_products() or weight.shape[2:] == (1, 1)
    lanes = under_way.lanes
    full_products = plain and full and products_pay and shape.stride == (1, 1)
    if full_products and winograd.pays(len(input) // lanes, weight, shape.made):
        return winograd.convolve(input, weight, bias, shape.before, lanes)
    many_weights = math.prod(weight.shape[:2]) >= MANY_WEIGHTS
    many = not full and weight.shape[2:] != (1, 1) and many_weights
    pixels = math.prod(shape.made)
    if plain and pixels <= (FEW_FOR_MANY_WEIGHTS if many else FEW_PIXELS) and products_pay:
        return by_products(small_maps.by_place if many_weights else small_maps.by_window, input, weight, bias, shape)
    avx2 = products and full_products and len(input) // lanes >= FEWEST_IMAGES and machine.avx2_at_most()
    if avx2 and by_rows.pays(weight, shape.before, pixels):
        return by_products(by_rows.by_rows, input, weight, bias, shape)
    if avx2 and one_channel.pays(weight, bias):
        return by_products(one_channel.by_image, input, weight, bias, shape)
    # A class that computes otherwise may add zeros of its own.
    alone = shape.unseen if torchs else input.shape[-2:].numel() <= FEW_PIXELS
    # With dilation where channels do not fill blocks of 16.
    slow_or_wrong = layer.groups > 1 or alone or (shape.dilated and weight.shape[1] % 16 > 0)
    number_format = torch.get_autocast_dtype("cpu")
    if slow_or_wrong and torch.is_autocast_enabled("cpu") and weight.dtype in (torch.float32, number_format):
        with torch.autocast("cpu", enabled=False):
            return compute(input.float(), weight.float(), None if bias is None else bias.float()).to(number_format)
    return compute(input, weight, bias)


def by_products(compute: Callable[..., OfLanes], images: Tensor, weight: Tensor, bias: Tensor | None, shape: "Shape") -> Tensor:
    """A convolution whose weights' gradient is made of products of matrices; for windows of one pixel, what comes out is one, too."""
    if weight.shape[2:] == shape.stride == (1, 1) and shape.before == (0, 0):
        # In one order, whoever made them: linear layers choose kernels by it. What leaves, and the gradient that the product by 1 makes,
        # are tensors of their own, as a convolution's: autograd adds others to a gradient in place, and FSDP's hooks want no view.
        pixels, kernels = (images * 1).permute(0, 2, 3, 1).contiguous(), weight.permute(0, 2, 3, 1).flatten(1)
        multiply = lanes_at_once.product if under_way.lanes > 1 else F.linear
        return multiply(pixels, kernels, bias).permute(0, 3, 1, 2).clone()
    if torch.is_autocast_enabled("cpu") and images.dtype != torch.float64:
        number_format = torch.get_autocast_dtype("cpu")
        images = images.to(number_format)
    found: Tensor = ByProducts.apply(images, weight, bias, shape.stride, shape.before, compute, under_way.lanes)  # pyright: ignore
    return found


@dataclass(frozen=True)
class Shape:
    """What a convolution makes of its images."""

    made: Pair
    # Whether some row or column of the window sees zeros alone, wherever it stands. For it oneDNN 3.12 leaves values of the weights'
    # gradient uncomputed, in bf16.
    unseen: bool
    stride: Pair
    before: Pair
    plain: bool
    dilated: bool


@cache
def shape_of(images: Pair, window: Pair, stride: Setting, dilation: Setting, padding: Setting | str) -> Shape:
    """The shape of torch's own convolution."""
    stride, dilation = pair(stride), pair(dilation)
    if isinstance(padding, str):
        zeros = [spread * (side - 1) if padding == "same" else 0 for spread, side in zip(dilation, window, strict=True)]
    else:
        zeros = [2 * one for one in pair(padding)]
    (rows, unseen_row), (columns, unseen_column) = (along(*side) for side in zip(images, window, stride, dilation, zeros, strict=True))
    plain = dilation == (1, 1) and not any(one % 2 for one in zeros)
    before = zeros[0] // 2, zeros[1] // 2
    return Shape((rows, columns), unseen_row or unseen_column, stride, before, plain, dilation != (1, 1))


def along(length: int, window: int, stride: int, dilation: int, zeros: int) -> tuple[int, bool]:
    """How many pixels come out along one side, and whether some part of the window sees zeros alone."""
    outputs = (length + zeros - dilation * (window - 1) - 1) // stride + 1
    first = [part * dilation - zeros // 2 for part in range(window)]
    return outputs, not all(any(0 <= place < length for place in range(at, at + outputs * stride, stride)) for at in first)


def pair(setting: Setting) -> Pair:
    """A setting of both sides, for which torch takes one number, too."""
    first, second = (setting, setting) if isinstance(setting, int) else (*setting, *setting)[:2]
    return first, second


class ByProducts(torch.autograd.Function):
    """A convolution; the gradient of its weights is one product of matrices, or one for each image, or row or place of the window."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
        ctx.stride, ctx.padding, ctx.compute, ctx.lanes = given
        ctx.dtype = weight.dtype
        if torch.is_autocast_enabled("cpu"):
            weight, bias = weight.to(images.dtype), None if bias is None else bias.to(images.dtype)
        ctx.save_for_backward(images, weight)
        ctx.settings = ctx.stride, ctx.padding, (1, 1), 1
        return lanes_at_once.convolved(images, weight, bias, ctx.settings, ctx.lanes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        images, weight = ctx.saved_tensors
        # In one order, whoever made it: sums go by it.
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        rest = images, weight, ctx.settings, ctx.lanes
        of_images = lanes_at_once.gradients_of_images(gradient, *rest) if ctx.needs_input_grad[0] else None
        of_weight: Any = None
        of_bias: Tensor | None = None
        if ctx.needs_input_grad[1]:
            # As the weights lie.
            own: Callable[[], Any] = partial(torch.empty_like, weight, dtype=ctx.dtype, memory_format=torch.channels_last)
            of_lanes = ctx.compute(gradient, images, weight.shape[2:], ctx.settings[:2], ctx.lanes, ctx.needs_input_grad[2])
            if gradient.dtype != ctx.dtype:
                of_lanes = [[own().copy_(one), lanes_at_once.cast(bias, ctx.dtype)] for one, bias in of_lanes]
            of_weight, of_bias = lanes_at_once.summed(of_lanes)
            of_weight = own().copy_(of_weight) if gradient.dtype == ctx.dtype else of_weight
        elif ctx.needs_input_grad[2]:
            parts = lanes_at_once.pieces(ctx.lanes, gradient)
            (of_bias,) = lanes_at_once.summed([[one.permute(0, 2, 3, 1).flatten(0, 2).sum(0).to(ctx.dtype)] for (one,) in parts])
        return of_images, of_weight, of_bias, None, None, None, None


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
        shares = gradient / ctx.side**2 + 0.0
        # Rows and columns that fill no window.
        below, beside = (min(length % ctx.side, 1) for length in ctx.shape)
        if below or beside:
            shares = F.pad(shares, (0, beside, 0, below))
        factors = float(ctx.side), float(ctx.side)
        return torch.ops.aten.upsample_nearest2d(shares.contiguous(memory_format=ctx.order), ctx.shape, *factors), None
