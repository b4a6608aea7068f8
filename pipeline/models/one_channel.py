"""Convolutions of grey images on CPUs: a product of matrices for each makes the gradients of weights and bias."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline import lanes_at_once

Pair = tuple[int, int]
# With fewer channels that leave, or with larger windows, oneDNN is as fast; and without a bias, which takes it half as long again.
CHANNELS, WINDOW = 16, (3, 3)


def pays(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a convolution of strides of 1 trains faster so, in fp32 with AVX2."""
    return bias is not None and len(weight) >= CHANNELS and weight.shape[1:] == (1, *WINDOW)


def convolve(images: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair, lanes: int) -> Tensor:
    """Return what F.conv2d does."""
    found: Tensor = OneChannel.apply(images, weight, bias, padding, lanes)  # pyright: ignore
    return found


class OneChannel(torch.autograd.Function):
    """A convolution of strides of 1, of images with one channel."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, padding: Pair, lanes: int) -> Tensor:
        ctx.settings, ctx.lanes = ((1, 1), padding, (1, 1), 1), lanes
        ctx.save_for_backward(images, weight)
        return lanes_at_once.convolved(images, weight, bias, ctx.settings, lanes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        images, weight = ctx.saved_tensors
        # In one order, whoever made it: sums go by it.
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        of_images: Tensor | None = None
        if ctx.needs_input_grad[0]:
            of_images = lanes_at_once.gradients_of_images(gradient, images, weight, ctx.settings, ctx.lanes)
        if not any(ctx.needs_input_grad[1:3]):
            return of_images, None, None, None, None
        parts = lanes_at_once.pieces(ctx.lanes, gradient, images)
        (both,) = lanes_at_once.summed([[product(one, some, ctx.settings[1])] for one, some in parts])
        assert both is not None
        # As the weights lie; and both are tensors of their own, as a convolution's.
        of_weight = torch.empty_like(weight).copy_(both[:-1].t().reshape(weight.shape))
        return of_images, of_weight, both[-1].clone(), None, None


def product(gradient: Tensor, images: Tensor, padding: Pair) -> Tensor:
    """A row for each place in the window: what it sees times the gradients of all outputs; and one of the gradients' own sums."""
    above, before = padding
    bordered = F.pad(images, (before, before, above, above)).contiguous()
    image, _, row, column = bordered.stride()
    rows = gradient.permute(0, 2, 3, 1)
    count, height, width, _ = rows.shape
    # A place's pixels side by side: with an output's window side by side MKL takes four times as long. And image by image: in one product
    # of them all, half as long again.
    seen = bordered.new_empty(count, 1 + WINDOW[0] * WINDOW[1], height * width)
    places = bordered.as_strided((count, *WINDOW, height, width), (image, row, column, row, column))
    seen[:, :-1].view(places.shape).copy_(places)
    seen[:, -1].fill_(1)
    return torch.bmm(seen, rows.flatten(1, 2)).sum(0)
