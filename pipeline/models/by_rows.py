"""The gradient of a convolution's weights as a product of matrices for each row of the window."""

import torch
from torch import Tensor

# What the products of so many images read stays in the caches.
BYTES_AT_ONCE = 3 << 19
# Values in a row of a window, channels that leave and pixels: with fewer of the first two, or with more pixels, oneDNN was as fast.
ENTERING, LEAVING, PIXELS = 48, 48, 196


def pays(weight: Tensor, padding: tuple[int, int], pixels: int) -> bool:
    """Whether a convolution of strides of 1 trains faster so, in fp32 with AVX2. Borders are passed over by oneDNN alone."""
    leaving, channels, height, width = weight.shape
    return padding == (0, 0) and pixels <= PIXELS and height > 1 and channels * width >= ENTERING and leaving >= LEAVING


def by_rows(of_weight: Tensor, gradient: Tensor, images: Tensor, *_: object) -> None:
    """One for each row, of a few images at a time."""
    leaving, channels, height, width = of_weight.shape
    made_height, made_width = gradient.shape[2:]
    # In one order, as the gradient is, whoever made them: sums go by it.
    entering = images.contiguous(memory_format=torch.channels_last)
    values = width * channels
    size = max(1, BYTES_AT_ONCE // (entering.element_size() * images.shape[2] * made_width * values))
    total: Tensor | None = None
    for one, some in zip(gradient.split(size), entering.split(size), strict=True):
        image, down, across = some.stride(0), some.stride(2), some.stride(3)
        # What a row of the window sees in each place; rows of images lie one behind another, so that those that it passes are one block.
        strips = some.as_strided((images.shape[2], len(some), made_width, values), (down, image, across, 1)).contiguous()
        pixels = made_height * len(some) * made_width
        blocks = strips.as_strided((height, pixels, values), (len(some) * made_width * values, values, 1))
        rows = one.permute(2, 0, 3, 1).reshape(pixels, leaving).t().expand(height, leaving, pixels)
        # As a batch MKL computes the products faster than one after another.
        total = torch.bmm(rows, blocks) if total is None else total.baddbmm_(rows, blocks)
    assert total is not None
    of_weight.permute(0, 2, 3, 1).copy_(total.view(height, leaving, width, channels).transpose(0, 1))
