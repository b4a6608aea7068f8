"""Convolutions with windows of 3 by 3 after Winograd: 16 pixels of an output take 36 multiplications a channel instead of 144."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.lanes_at_once import summed

# OUT by OUT pixels come out of IN by IN, a tile: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2015.
OUT, IN = 4, 6
IMAGES = [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0], [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1]]
WEIGHTS = [[1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6], [1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1]]
OUTPUTS = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
# So many at once stay in the caches.
TILES_AT_ONCE = 128
# What pays, as measured: channels and values for the transforms of tiles, pixels for those of the weights, and tiles that are used.
CHANNELS, VALUES_PER_IMAGE, PIXELS, USED = 64, 8000, 512, 0.76


def pays(images: int, weight: Tensor, made: tuple[int, int]) -> bool:
    """Whether a convolution of strides of 1 to maps of such a size is faster so, and an image has no more tiles than caches hold."""
    pixels, tiles, channels = made[0] * made[1], -(-made[0] // OUT) * -(-made[1] // OUT), min(weight.shape[:2])
    enough = channels >= CHANNELS and channels * pixels >= VALUES_PER_IMAGE and images * pixels >= PIXELS
    return weight.shape[2:] == (3, 3) and enough and pixels >= USED * tiles * OUT**2 and tiles <= 2 * TILES_AT_ONCE


def both_ways(rows: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """What is done to the rows and to the columns of a tile, as one matrix."""
    matrix = torch.tensor(rows, dtype=torch.float64, device=like.device)
    return torch.kron(matrix, matrix).to(like.dtype)


def convolve(images: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], lanes: int = 1) -> Tensor:
    """Return the same as F.conv2d, rounded otherwise."""
    found: Tensor = Winograd.apply(images, weight, bias, padding, lanes)  # pyright: ignore
    return found


class Winograd(torch.autograd.Function):
    """A convolution of strides of 1. Images and weights are transformed and multiplied, as 36 matrices each, and transformed back."""

    @staticmethod
    def forward(images: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], lanes: int) -> Tensor:
        height, width = (side + 2 * zeros - 2 for side, zeros in zip(images.shape[2:], padding, strict=True))
        rows, columns = -(-height // OUT), -(-width // OUT)
        shape = len(images), len(weight), rows * OUT, columns * OUT
        found = torch.empty(shape, dtype=images.dtype, memory_format=torch.channels_last)
        kernels, back = transformed(weight).transpose(1, 2), both_ways(OUTPUTS, images)
        for start in range(0, len(images), len(images) // lanes):
            lane = slice(start, start + len(images) // lanes)
            for part, out in in_parts(rows * columns, images[lane], found[lane]):
                products = tiles_of(part, padding, rows, columns) @ kernels
                pixels = grid(out)
                pixels.copy_((back @ products.flatten(1)).view(pixels.shape))
        if found.shape[2:] != (height, width):
            found = found[:, :, :height, :width].clone(memory_format=torch.channels_last)
        return found if bias is None else found.add_(bias[:, None, None])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, weight, _, ctx.padding, ctx.lanes = inputs
        ctx.save_for_backward(images, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        images, weight = ctx.saved_tensors
        # In one order, whoever made it: sums go by it.
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        rows, columns = (-(-side // OUT) for side in gradient.shape[2:])
        below, behind = rows * OUT - gradient.shape[2], columns * OUT - gradient.shape[3]
        bordered = F.pad(gradient, (0, behind, 0, below)) if below or behind else gradient
        of_images = torch.empty_like(images, memory_format=torch.channels_last)
        kernels, back = transformed(weight), both_ways(OUTPUTS, images).t()
        of_lanes: list[list[Tensor | None]] = []
        for start in range(0, len(images), len(images) // ctx.lanes):
            unbordered, *of = (one[start : start + len(images) // ctx.lanes] for one in (gradient, images, bordered, of_images))
            of_kernels: Tensor | None = None
            for part, arrived, out in in_parts(rows * columns, *of):
                spread = (back @ grid(arrived).reshape(OUT * OUT, -1)).view(IN * IN, -1, len(weight))
                if ctx.needs_input_grad[0]:
                    out.copy_(images_of(spread @ kernels, out.shape, ctx.padding, rows, columns))
                if ctx.needs_input_grad[1]:
                    two = spread.transpose(1, 2), tiles_of(part, ctx.padding, rows, columns)
                    of_kernels = torch.bmm(*two) if of_kernels is None else of_kernels.baddbmm_(*two)
            of_bias = unbordered.permute(0, 2, 3, 1).flatten(0, 2).sum(0) if ctx.needs_input_grad[2] else None
            of_lanes.append([None if of_kernels is None else transformed_back(of_kernels), of_bias])
        return of_images if ctx.needs_input_grad[0] else None, *summed(of_lanes), None, None


def in_parts(tiles: int, *of: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """So many images at once that their tiles stay in the caches."""
    size = max(1, TILES_AT_ONCE // tiles)
    for start in range(0, len(of[0]), size):
        yield tuple(one[start : start + size] for one in of)


def transformed(weight: Tensor) -> Tensor:
    """36 matrices of the channels that leave by those that enter."""
    rows = weight.permute(0, 2, 3, 1).reshape(len(weight), 9, -1)
    return torch.bmm(both_ways(WEIGHTS, weight).expand(len(weight), -1, -1), rows).transpose(0, 1)


def transformed_back(kernels: Tensor) -> Tensor:
    """The gradient of the weights, in channels-last order."""
    back = both_ways(WEIGHTS, kernels).t().expand(kernels.shape[1], -1, -1)
    return torch.bmm(back, kernels.transpose(0, 1)).unflatten(1, (3, 3)).permute(0, 3, 1, 2)


def grid(pixels: Tensor) -> Tensor:
    """A view by a pixel's row and column within its tile, its image, its tile's row and column, and its channel."""
    return pixels.permute(0, 2, 3, 1).unflatten(1, (-1, OUT)).unflatten(3, (-1, OUT)).permute(2, 4, 0, 1, 3, 5)


def tiles_of(images: Tensor, padding: tuple[int, int], rows: int, columns: int) -> Tensor:
    """36 matrices of tiles by channels; tiles overlap by what a window reaches beyond its pixel."""
    (above, before), (height, width) = padding, images.shape[2:]
    below, behind = rows * OUT + 2 - height - above, columns * OUT + 2 - width - before
    bordered = F.pad(images.permute(0, 2, 3, 1), (0, 0, before, behind, above, below))
    number, row, column, channel = bordered.stride()
    channels = images.shape[1]
    shape = IN, IN, len(images), rows, columns, channels
    tiles = bordered.as_strided(shape, (row, column, number, row * OUT, column * OUT, channel))
    return (both_ways(IMAGES, images) @ tiles.reshape(IN * IN, -1)).view(IN * IN, -1, channels)


def images_of(tiles: Tensor, shape: torch.Size, padding: tuple[int, int], rows: int, columns: int) -> Tensor:
    """What tiles_of made of images, from the other end: the gradient of each pixel is the sum of those of its tiles."""
    number, channels, height, width = shape
    tiles = (both_ways(IMAGES, tiles).t() @ tiles.flatten(1)).view(IN, IN, number, rows, columns, channels)
    bordered = tiles.new_zeros(number, (rows + 1) * OUT, (columns + 1) * OUT, channels).permute(0, 3, 1, 2)
    pixels, over = grid(bordered), IN - OUT
    pixels[:, :, :, :-1, :-1] = tiles[:OUT, :OUT]
    pixels[:over, :, :, 1:, :-1] += tiles[OUT:, :OUT]
    pixels[:, :over, :, :-1, 1:] += tiles[:OUT, OUT:]
    pixels[:over, :over, :, 1:, 1:] += tiles[OUT:, OUT:]
    above, before = padding
    return bordered[:, :, above : above + height, before : before + width]
