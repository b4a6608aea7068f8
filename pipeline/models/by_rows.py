"""The gradient of a convolution's weights as a product of matrices for each row of the window."""

import torch
from torch import Tensor

from pipeline.lanes_at_once import OfLanes

# What the products of so many images read stays in the caches.
BYTES_AT_ONCE = 3 << 19
# Values in a row of a window, channels that leave and pixels: with fewer of the first two, or with more pixels, oneDNN was as fast.
ENTERING, LEAVING, PIXELS = 48, 48, 196


def pays(weight: Tensor, padding: tuple[int, int], pixels: int) -> bool:
    """Whether a convolution of strides of 1 trains faster so, in fp32 with AVX2. Borders are passed over by oneDNN alone."""
    leaving, channels, height, width = weight.shape
    return padding == (0, 0) and pixels <= PIXELS and height > 1 and channels * width >= ENTERING and leaving >= LEAVING


def by_rows(gradient: Tensor, images: Tensor, window: tuple[int, int], _: object, lanes: int, biased: bool) -> OfLanes:
    """One for each row, of a few images at a time."""
    (height, width), (leaving, _, made_width) = window, gradient.shape[1:]
    # In one order, as the gradient is, whoever made them: sums go by it.
    entering = images.contiguous(memory_format=torch.channels_last)
    (count, channels, side, _), (image, _, down, across) = entering.shape, entering.stride()
    values, of_lane = width * channels, count // lanes
    most = max(1, BYTES_AT_ONCE // (entering.element_size() * side * made_width * values))
    size = -(-of_lane // -(-of_lane // most))
    parts = [min(size, of_lane - at) for at in range(0, of_lane, size)]
    # What a row of the window sees in each place; rows of images lie one behind another, so that those that it passes are one block.
    seen = entering.as_strided((side, count, made_width, values), (down, image, across, 1))
    cut = (one.split(parts * lanes, 1) for one in (seen, gradient.permute(2, 0, 3, 1)))
    products: list[Tensor] = []
    biases: list[Tensor | None] = []
    for number, (some, one) in enumerate(zip(*cut, strict=True)):
        # Copies, which begin as tensors of their own do: products may round by where they begin.
        strips, rows = (of.clone(memory_format=torch.contiguous_format) for of in (some, one))
        rows = rows.view(-1, leaving)
        # While they are in the caches.
        bias = rows.sum(0) if biased else None
        blocks = strips.as_strided((height, len(rows), values), (some.shape[1] * made_width * values, values, 1))
        matrices = rows.t().expand(height, leaving, len(rows))
        # As a batch MKL computes the products faster than one after another.
        if number % len(parts) == 0:
            products.append(torch.bmm(matrices, blocks))
            biases.append(bias)
        else:
            products[-1].baddbmm_(matrices, blocks)
            biases[-1] = None if bias is None else biases[-1] + bias
    in_order = (one.unflatten(2, (width, channels)).permute(1, 3, 0, 2) for one in products)
    return [list(of_one) for of_one in zip(in_order, biases, strict=True)]
