"""The gradients of a convolution of grey images as a product of matrices for each image, with its bias's."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.lanes_at_once import OfLanes
from pipeline.order_of_sums import ALIGNED_BYTES

# With fewer channels that leave, or with larger windows, oneDNN is as fast; and without a bias, which takes it half as long again.
CHANNELS, WINDOW = 16, (3, 3)
# Of what places see: a few images are enough, and many would take memory.
BYTES_AT_ONCE = 1 << 22
Pair = tuple[int, int]


def pays(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a convolution of strides of 1 trains faster so, in fp32 with AVX2."""
    return bias is not None and len(weight) >= CHANNELS and weight.shape[1:] == (1, *WINDOW)


def by_image(gradient: Tensor, images: Tensor, window: Pair, settings: tuple[Pair, Pair], lanes: int, _: bool) -> OfLanes:
    """A row for each place in the window: what it sees times the gradients of all outputs; and one of the gradients' own sums."""
    above, before = settings[1]
    bordered = (F.pad(images, (before, before, above, above)) if above or before else images).contiguous()
    rows, made = gradient.permute(0, 2, 3, 1).flatten(1, 2), gradient.shape[2:]
    (count, pixels, leaving), places = rows.shape, math.prod(window)
    size = max(1, BYTES_AT_ONCE // ((places + 1) * pixels * images.element_size()))
    products: list[Tensor] = []
    for one, some in zip(rows.split(size), bordered.split(size), strict=True):
        image, row, column = map(some.stride, (0, 2, 3))
        # Pixels that a place sees, side by side: with an output's window side by side MKL takes four times as long. And image by image:
        # in one product of them all, half as long again.
        seen = apart(some, (len(some), places + 1, pixels))
        of_places = some.as_strided((len(some), *window, *made), (image, row, column, row, column))
        seen[:, :places].view(of_places.shape).copy_(of_places)
        seen[:, places].fill_(1)
        aligned = one.stride(0) * one.element_size() % ALIGNED_BYTES == 0
        products.append(torch.bmm(seen, one if aligned else apart(one, one.shape).copy_(one)))
    of_lanes = torch.cat(products).view(lanes, count // lanes, places + 1, leaving).sum(1)
    # By number, as autograd lets nobody add to what is iterated over. A bias's gradient is a tensor of its own.
    both = (of_lanes[lane] for lane in range(lanes))
    return [[one[:-1].t().view(leaving, 1, *window), one[-1].clone()] for one in both]


def apart(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A matrix for each image, each in memory that begins as that of a tensor of its own: products may round by where it does."""
    count, rows, columns = shape
    unit = ALIGNED_BYTES // like.element_size()
    room = -(-rows * columns // unit) * unit
    return like.new_empty(count, room)[:, : rows * columns].view(shape)
