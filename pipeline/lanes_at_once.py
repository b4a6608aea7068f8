"""Layers through which several lanes of a rank go at once, to the bits of one lane after another.

The images of all lanes go through a layer in one piece, where its kernels then sum up in the same order. What is summed over images is
summed lane by lane: gradients of weights, which are added up in the tree of lanes, and BatchNorm's statistics. Dropout draws each lane's
own numbers.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import order_of_sums
from pipeline.order_of_sums import Settings, form, gradient_of_images, joined, pieces

# Gradients of each lane; None of what needs none.
OfLanes = list[list[Tensor | None]]


class UnderWay(threading.local):
    """The lanes that are computed at once."""

    def __init__(self) -> None:
        self.lanes = 1
        # The state of each lane's generator.
        self.draws: list[Tensor] = []
        # BatchNorm's running mean and variance, of each lane.
        self.statistics: dict[Any, list[tuple[Tensor, Tensor]]] = {}


under_way = UnderWay()


@contextmanager
def at_once(draws: list[Tensor]) -> Generator[None]:
    """Within, a batch is that of so many lanes, one behind another, whose generators stand there."""
    under_way.lanes, under_way.draws = len(draws), draws
    try:
        yield
    finally:
        under_way.lanes, under_way.draws, under_way.statistics = 1, [], {}


# Each of their values comes from one image. None has an exponential, or a product that something is added to: those round otherwise in
# vectors than in what is left of them.
BY_IMAGE = {
    nn.ReLU,
    nn.ReLU6,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Flatten,
    nn.Identity,
    nn.Sequential,
}


def supported(model: nn.Module) -> bool:
    """Whether all layers are known; what a model computes between them must keep images apart, as torchvision's do."""
    for layer in model.modules():
        owned = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if type(layer) not in BY_IMAGE and (owned or not list(layer.children())) and not is_plain(layer):
            return False
    return torch.get_num_threads() == 1


def is_plain(layer: Any) -> bool:
    """Whether a layer is one of those below, trains, and computes as most of its kind do."""
    if type(layer) is nn.BatchNorm2d:
        return layer.training and layer.track_running_stats and layer.momentum is not None and layer.affine
    if type(layer) is nn.Conv2d:
        return layer.training and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) in (nn.Linear, nn.Dropout) and layer.training


def prepare(model: nn.Module) -> None:
    """Let layers compute several lanes where these are under way; convolutions do since cpu_layers.replace_kernels."""
    layers: list[Any] = list(model.modules())
    for layer in layers:
        replacement = {nn.Linear: linear, nn.BatchNorm2d: batch_norm, nn.Dropout: dropout}.get(type(layer))
        if replacement is not None and "forward" not in vars(layer):
            layer.forward = partial(replacement, layer, layer.forward)


def summed(of_lanes: OfLanes) -> list[Tensor | None]:
    """What was computed of each lane, added up in their tree; their number is a power of two."""
    while len(of_lanes) > 1:
        left, right = ([one for lane in side for one in lane if one is not None] for side in (of_lanes[::2], of_lanes[1::2]))
        if left:
            torch._foreach_add_(left, right)  # pyright: ignore
        of_lanes = of_lanes[::2]
    return of_lanes[0]


def cast(one: Tensor | None, number_format: torch.dtype | None) -> Any:
    """As autocast does, if it does."""
    return one if one is None or number_format in (None, one.dtype) else one.to(number_format)


def autocast_format(*of: Tensor | None) -> torch.dtype | None:
    """What autocast makes of tensors, None if it leaves them alone."""
    casts = torch.is_autocast_enabled("cpu") and all(one is None or one.dtype != torch.float64 for one in of)
    return torch.get_autocast_dtype("cpu") if casts else None


def convolved(images: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, lanes: int) -> Tensor:
    """What a convolution makes of several lanes."""
    alike = lanes == 1 or order_of_sums.convolutions_alike(form(images), form(weight), bias is not None, settings, lanes)
    return joined([F.conv2d(part, weight, bias, *settings) for (part,) in pieces(1 if alike else lanes, images)])


def gradients_of_images(gradient: Tensor, images: Tensor, weight: Tensor, settings: Settings, lanes: int) -> Tensor:
    """What it gives their images."""
    alike = lanes == 1 or order_of_sums.gradients_alike(form(images), form(weight), settings, lanes)
    parts = pieces(1 if alike else lanes, gradient, images)
    return joined([gradient_of_images(one, some, weight, settings) for one, some in parts])


def convolve(layer: Any, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What torch's own convolution computes."""
    settings = layer.stride, layer.padding, layer.dilation, layer.groups
    number_format = autocast_format(images, weight, bias)
    found: Tensor = Convolution.apply(cast(images, number_format), weight, bias, settings, number_format, under_way.lanes)  # pyright: ignore
    return found


class Convolution(torch.autograd.Function):
    """torch's own convolution."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
        ctx.settings, number_format, ctx.lanes = given
        ctx.dtype, weight = weight.dtype, cast(weight, number_format)
        ctx.save_for_backward(images, weight)
        return convolved(images, weight, cast(bias, number_format), ctx.settings, ctx.lanes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        images, weight = ctx.saved_tensors
        of_images, of_weight, of_bias = ctx.needs_input_grad[:3]
        order = torch.channels_last if images.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        gradient = gradient.contiguous(memory_format=order)
        made = gradients_of_images(gradient, images, weight, ctx.settings, ctx.lanes) if of_images else None
        of_lanes: OfLanes = [[None, None]]
        if of_weight or of_bias:
            stride, padding, dilation, groups = ctx.settings
            rest = [len(weight)] if of_bias else None, stride, padding, dilation, False, (0, 0), groups, (False, of_weight, of_bias)
            back: Any = torch.ops.aten.convolution_backward
            found = [back(*part, weight, *rest) for part in pieces(ctx.lanes, gradient, images)]
            of_lanes = [[cast(one, ctx.dtype), cast(other if of_bias else None, ctx.dtype)] for _, one, other in found]
        return made, *summed(of_lanes), None, None, None


def linear(layer: Any, compute: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:  # noqa: A002
    """nn.Linear."""
    return product(input, layer.weight, layer.bias) if under_way.lanes > 1 else compute(input)


def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What F.linear computes."""
    number_format = autocast_format(rows, weight, bias)
    found: Tensor = Linear.apply(cast(rows, number_format), weight, bias, number_format, under_way.lanes)  # pyright: ignore
    return found


class Linear(torch.autograd.Function):
    """Rows by a matrix of weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, number_format: torch.dtype | None, lanes: int) -> Tensor:
        ctx.lanes, ctx.dtype = lanes, weight.dtype
        weight = cast(weight, number_format)
        ctx.save_for_backward(rows, weight)
        bias = cast(bias, number_format)
        alike = order_of_sums.products_alike(rows.shape, weight.shape, rows.dtype, bias is not None, lanes)
        return joined([F.linear(part, weight, bias) for (part,) in pieces(1 if alike else lanes, rows)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad[:3]
        flat = gradient.flatten(0, -2)
        alike = of_rows and order_of_sums.gradients_of_rows_alike(flat.shape, weight.shape, flat.dtype, ctx.lanes)
        made = [part.mm(weight) for (part,) in pieces(1 if alike else ctx.lanes, flat)] if of_rows else []
        of_lanes: OfLanes = []
        for gradients, some in pieces(ctx.lanes, flat, rows.flatten(0, -2)):
            one = cast(gradients.t().mm(some), ctx.dtype) if of_weight else None
            of_lanes.append([one, cast(gradients.sum(0), ctx.dtype) if of_bias else None])
        return joined(made).view(rows.shape) if of_rows else None, *summed(of_lanes), None, None


def batch_norm(layer: Any, compute: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:  # noqa: A002
    """BatchNorm of each lane by itself; every lane begins with the same running statistics, and keeps what it makes of them."""
    if under_way.lanes == 1:
        return compute(input)
    layer.num_batches_tracked.add_(1)
    statistics = [(layer.running_mean.clone(), layer.running_var.clone()) for _ in range(under_way.lanes)]
    under_way.statistics[layer] = statistics
    found: Any = BatchNorm.apply(input, layer.weight, layer.bias, statistics, layer.momentum, layer.eps)  # pyright: ignore
    return found


def set_statistics(lane: int) -> None:
    """Set BatchNorm's running statistics to what this one of the lanes has made of them."""
    kept = [one for layer in under_way.statistics for one in (layer.running_mean, layer.running_var)]
    if kept:
        torch._foreach_copy_(kept, [one for of_lanes in under_way.statistics.values() for one in of_lanes[lane]])  # pyright: ignore


class BatchNorm(torch.autograd.Function):
    """Each lane's own."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, *given: Any) -> Tensor:
        ctx.statistics, momentum, ctx.eps = given
        compute: Any = torch.native_batch_norm
        parts = zip(pieces(len(ctx.statistics), images), ctx.statistics, strict=True)
        found = [compute(*part, weight, bias, *running, True, momentum, ctx.eps) for part, running in parts]
        ctx.save_for_backward(images, weight, *(one for _, *scale in found for one in scale))
        return torch.cat([made for made, *_ in found])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        images, weight, *saved = ctx.saved_tensors
        back: Any = torch.ops.aten.native_batch_norm_backward
        scales = zip(saved[::2], saved[1::2], strict=True)
        parts = zip(pieces(len(ctx.statistics), gradient, images), ctx.statistics, scales, strict=True)
        found = [back(*part, weight, *running, *scale, True, ctx.eps, ctx.needs_input_grad[:3]) for part, running, scale in parts]
        of_images = torch.cat([made for made, *_ in found]) if ctx.needs_input_grad[0] else None
        return of_images, *summed([rest for _, *rest in found]), None, None, None


def dropout(layer: Any, compute: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:  # noqa: A002
    """Each lane draws where its own generator stands."""
    if under_way.lanes == 1 or not layer.training:
        return compute(input)
    found: list[Tensor] = []
    for lane, some in enumerate(input.chunk(under_way.lanes)):
        torch.set_rng_state(under_way.draws[lane])
        found.append(F.dropout(some, layer.p, training=True))
        under_way.draws[lane] = torch.get_rng_state()
    return torch.cat(found)
