"""The gradient of a convolution's weights to maps of few pixels: as one product of matrices, or as one for each place in the window."""

import itertools
import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.lanes_at_once import OfLanes, pieces

Pair = tuple[int, int]


def by_window(gradient: Tensor, images: Tensor, window: Pair, settings: tuple[Pair, Pair], lanes: int, biased: bool) -> OfLanes:
    """One product: of the gradients of outputs and the pixels that each is made of."""
    (down, across), (height, width) = settings
    found: OfLanes = []
    for one, some in pieces(lanes, gradient, images):
        bordered = F.pad(some.permute(0, 2, 3, 1), (0, 0, width, width, height, height))
        number, row, column, channel = bordered.stride()
        shape = (len(some), *one.shape[2:], *window, some.shape[1])
        windows = bordered.as_strided(shape, (number, row * down, column * across, row, column, channel))
        leaving = one.permute(0, 2, 3, 1).flatten(0, 2)
        product = leaving.t() @ windows.reshape(len(leaving), math.prod(shape[3:]))
        found.append([product.unflatten(1, shape[3:]).permute(0, 3, 1, 2), leaving.sum(0) if biased else None])
    return found


def by_place(gradient: Tensor, images: Tensor, window: Pair, settings: tuple[Pair, Pair], lanes: int, biased: bool) -> OfLanes:
    """A product for each place in the window, without the zeros around images."""
    found: OfLanes = []
    for one, some in pieces(lanes, gradient, images):
        # In one order, as the gradient is, whoever made them: sums go by it.
        entering, leaving = some.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1), one.permute(0, 2, 3, 1)
        downs, acrosses = map(inside, window, entering.shape[1:3], leaving.shape[1:3], *settings)
        pairs = (
            (leaving[:, made_down, made_across].flatten(0, 2).t(), entering[:, down, across].flatten(0, 2))
            for (made_down, down), (made_across, across) in itertools.product(downs, acrosses)
        )
        if torch.is_grad_enabled():
            # With create_graph=True autograd records this; it cannot record `out=`.
            places = torch.stack([left @ right for left, right in pairs])
        else:
            places = one.new_empty(len(downs) * len(acrosses), leaving.shape[3], entering.shape[3])
            for product, (left, right) in zip(places, pairs, strict=True):
                torch.mm(left, right, out=product)
        bias = leaving.flatten(0, 2).sum(0) if biased else None
        found.append([places.unflatten(0, window).permute(2, 3, 0, 1), bias])
    return found


@cache
def inside(window: int, length: int, made: int, stride: int, zeros: int) -> list[tuple[slice, slice]]:
    """Along one side, for each place in the window: the outputs for which it lies within the images, and the pixels there."""
    found: list[tuple[slice, slice]] = []
    for place in range(window):
        first, end = max(0, -(-(zeros - place) // stride)), min(made, (length - 1 + zeros - place) // stride + 1)
        at, some = first * stride + place - zeros, max(0, end - first)
        found.append((slice(first, first + some), slice(at, at + some * stride, stride)))
    return found
