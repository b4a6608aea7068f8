"""Convolutions with windows of 3 by 3 after Winograd: 16 pixels of an output take 36 multiplications a channel instead of 144."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from pipeline.lanes_at_once import summed

Pair = tuple[int, int]
Matrix = tuple[tuple[float, ...], ...]
# OUT by OUT pixels come out of IN by IN, a tile: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2015.
OUT, IN = 4, 6
OVER = IN - OUT
IMAGES = (4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0), (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0), (0, 4, 0, -5, 0, 1)
WEIGHTS = (1 / 4, 0, 0), (-1 / 6,) * 3, (-1 / 6, 1 / 6, -1 / 6), (1 / 24, 1 / 12, 1 / 6), (1 / 24, -1 / 12, 1 / 6), (0, 0, 1)
OUTPUTS = (1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)
# So many at once stay in the caches.
TILES_AT_ONCE = 128
# What pays, as measured: channels and values for the transforms of tiles, pixels for those of the weights, and tiles that are used.
CHANNELS, VALUES_PER_IMAGE, PIXELS, USED = 64, 8000, 512, 0.76


def pays(images: int, weight: Tensor, made: tuple[int, int]) -> bool:
    """Whether a convolution of strides of 1 to maps of such a size is faster so, and an image has no more tiles than caches hold."""
    pixels, tiles, channels = made[0] * made[1], -(-made[0] // OUT) * -(-made[1] // OUT), min(weight.shape[:2])
    enough = channels >= CHANNELS and channels * pixels >= VALUES_PER_IMAGE and images * pixels >= PIXELS
    return weight.shape[2:] == (3, 3) and enough and pixels >= USED * tiles * OUT**2 and tiles <= 2 * TILES_AT_ONCE


@cache
def both_ways(rows: Matrix, dtype: torch.dtype) -> Tensor:
    """What is done to the rows and to the columns of a tile, as one matrix, which nobody changes."""
    matrix = torch.tensor(rows, dtype=torch.float64, device="cpu")
    return torch.kron(matrix, matrix).to(dtype)


def convolve(images: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair, lanes: int = 1) -> Tensor:
    """Return the same as F.conv2d, rounded otherwise."""
    found: Tensor = Winograd.apply(images, weight, bias, padding, lanes)  # pyright: ignore
    return found


class Winograd(torch.autograd.Function):
    """A convolution of strides of 1. Images and weights are transformed and multiplied, as 36 matrices each, and transformed back."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair, lanes: int) -> Tensor:
        height, width = (side + 2 * zeros - OVER for side, zeros in zip(images.shape[2:], padding, strict=True))
        tiles = rows, columns = -(-height // OUT), -(-width // OUT)
        shape = len(images), len(weight), rows * OUT, columns * OUT
        found = torch.empty(shape, dtype=images.dtype, memory_format=torch.channels_last)
        kernels = transformed(weight)
        ctx.padding, ctx.lanes = padding, lanes
        ctx.save_for_backward(images, weight, kernels if ctx.needs_input_grad[0] else None)
        # A lane's last part may be smaller.
        tiles_of, outputs_of = cache(partial(from_images, images, padding, tiles)), cache(partial(to_outputs, found, tiles))
        for lane in zip(images.chunk(lanes), found.chunk(lanes), strict=True):
            for part, out in in_parts(rows * columns, *lane):
                products, transform = outputs_of(len(part))
                torch.bmm(tiles_of(len(part))(part), kernels.transpose(1, 2), out=products)
                transform(out)
        if found.shape[2:] != (height, width):
            found = found[:, :, :height, :width].clone(memory_format=torch.channels_last)
        return found if bias is None else found.add_(bias[:, None, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        images, weight, kernels = ctx.saved_tensors
        if torch.is_grad_enabled():
            # For gradients of gradients.
            rest = [len(weight)], (1, 1), ctx.padding, (1, 1), False, (0, 0), 1, ctx.needs_input_grad[:3]
            return *torch.ops.aten.convolution_backward(gradient, images, weight, *rest), None, None
        # In one order, whoever made it: sums go by it.
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        tiles = rows, columns = -(-gradient.shape[2] // OUT), -(-gradient.shape[3] // OUT)
        of_images = torch.empty_like(images, memory_format=torch.channels_last)
        tiles_of, gradients_of = cache(partial(from_images, images, ctx.padding, tiles)), cache(partial(from_outputs, gradient, tiles))
        images_of = cache(partial(to_images, images, ctx.padding, tiles))
        of_lanes: list[list[Tensor | None]] = []
        for lane in zip(*(one.chunk(ctx.lanes) for one in (gradient, images, of_images)), strict=True):
            of_kernels: Tensor | None = None
            for arrived, part, out in in_parts(rows * columns, *lane):
                leaving = gradients_of(len(part))(arrived)
                if ctx.needs_input_grad[0]:
                    products, transform = images_of(len(part))
                    torch.bmm(leaving, kernels, out=products)
                    transform(out)
                if ctx.needs_input_grad[1]:
                    two = leaving.transpose(1, 2), tiles_of(len(part))(part)
                    of_kernels = torch.bmm(*two) if of_kernels is None else of_kernels.baddbmm_(*two)
            of_bias = lane[0].permute(0, 2, 3, 1).flatten(0, 2).sum(0) if ctx.needs_input_grad[2] else None
            of_lanes.append([None if of_kernels is None else transformed_back(of_kernels), of_bias])
        return of_images if ctx.needs_input_grad[0] else None, *summed(of_lanes), None, None


def in_parts(tiles: int, *of: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """So many images at once that their tiles stay in the caches."""
    return zip(*(one.split(max(1, TILES_AT_ONCE // tiles)) for one in of), strict=True)


def transformed(weight: Tensor) -> Tensor:
    """36 matrices of the channels that leave by those that enter."""
    rows = weight.permute(0, 2, 3, 1).reshape(len(weight), 9, -1)
    return torch.bmm(both_ways(WEIGHTS, weight.dtype).expand(len(weight), -1, -1), rows).transpose(0, 1)


def transformed_back(kernels: Tensor) -> Tensor:
    """The gradient of the weights, in channels-last order."""
    back = both_ways(WEIGHTS, kernels.dtype).t().expand(kernels.shape[1], -1, -1)
    return torch.bmm(back, kernels.transpose(0, 1)).unflatten(1, (3, 3)).permute(0, 3, 1, 2)


def grid(pixels: Tensor) -> Tensor:
    """A view by a pixel's row and column within its tile, its image, its tile's row and column, and its channel."""
    return pixels.permute(0, 2, 3, 1).unflatten(1, (-1, OUT)).unflatten(3, (-1, OUT)).permute(2, 4, 0, 1, 3, 5)


# Each of the following takes its memory once, for so many images, and uses it for one part of a batch after another.


def from_images(images: Tensor, padding: Pair, tiles: Pair, number: int) -> Callable[[Tensor], Tensor]:
    """Of images, 36 matrices of tiles by channels; tiles overlap by what a window reaches beyond its pixel."""
    (above, before), (rows, columns), (channels, height, width) = padding, tiles, images.shape[1:]
    bordered = images.new_zeros(number, rows * OUT + OVER, columns * OUT + OVER, channels)
    inner = bordered[:, above : above + height, before : before + width].permute(0, 3, 1, 2)
    image, row, column, channel = bordered.stride()
    overlapping = bordered.as_strided((IN, IN, number, *tiles, channels), (row, column, image, row * OUT, column * OUT, channel))
    apart = torch.empty_like(overlapping, memory_format=torch.contiguous_format)
    made = images.new_empty(IN * IN, number * rows * columns, channels)
    product = partial(torch.mm, both_ways(IMAGES, images.dtype), apart.view(IN * IN, -1), out=made.flatten(1))

    def transform(part: Tensor) -> Tensor:
        inner.copy_(part)
        apart.copy_(overlapping)
        product()
        return made

    return transform


def to_outputs(found: Tensor, tiles: Pair, number: int) -> tuple[Tensor, Callable[[Tensor], None]]:
    """Memory for products, and what makes an output's pixels of them."""
    products = found.new_empty(IN * IN, number * tiles[0] * tiles[1], found.shape[1])
    made = found.new_empty(OUT, OUT, number, *tiles, found.shape[1])
    product = partial(torch.mm, both_ways(OUTPUTS, found.dtype), products.flatten(1), out=made.view(OUT * OUT, -1))

    def transform(out: Tensor) -> None:
        product()
        grid(out).copy_(made)

    return products, transform


def from_outputs(gradient: Tensor, tiles: Pair, number: int) -> Callable[[Tensor], Tensor]:
    """The way back: of an output's gradients, those of the products."""
    rows, columns = tiles
    leaving, height, width = gradient.shape[1:]
    even = (height, width) == (rows * OUT, columns * OUT)
    whole = None if even else gradient.new_zeros(number, rows * OUT, columns * OUT, leaving).permute(0, 3, 1, 2)
    apart = gradient.new_empty(OUT, OUT, number, *tiles, leaving)
    made = gradient.new_empty(IN * IN, number * rows * columns, leaving)
    product = partial(torch.mm, both_ways(OUTPUTS, gradient.dtype).t(), apart.view(OUT * OUT, -1), out=made.flatten(1))

    def transform(part: Tensor) -> Tensor:
        if whole is not None:
            whole[:, :, :height, :width] = part
        apart.copy_(grid(part if whole is None else whole))
        product()
        return made

    return transform


def to_images(images: Tensor, padding: Pair, tiles: Pair, number: int) -> tuple[Tensor, Callable[[Tensor], None]]:
    """Memory for the gradients of tiles, and what makes images' of them: the gradient of each pixel is the sum of those of its tiles."""
    (above, before), (rows, columns), (channels, height, width) = padding, tiles, images.shape[1:]
    products = images.new_empty(IN * IN, number * rows * columns, channels)
    made = images.new_empty(IN, IN, number, *tiles, channels)
    bordered = images.new_zeros(number, (rows + 1) * OUT, (columns + 1) * OUT, channels).permute(0, 3, 1, 2)
    pixels, inner = grid(bordered), bordered[:, :, above : above + height, before : before + width]
    own, borders = pixels[:, :, :, :-1, :-1], (pixels[:, :, :, -1], pixels[:, :, :, :, -1])
    sums = [
        (pixels[:OVER, :, :, 1:, :-1], made[OUT:, :OUT]),
        (pixels[:, :OVER, :, :-1, 1:], made[:OUT, OUT:]),
        (pixels[:OVER, :OVER, :, 1:, 1:], made[OUT:, OUT:]),
    ]
    product = partial(torch.mm, both_ways(IMAGES, images.dtype).t(), products.flatten(1), out=made.view(IN * IN, -1))

    def transform(out: Tensor) -> None:
        product()
        own.copy_(made[:OUT, :OUT])
        for border in borders:
            border.zero_()
        for place, of_tiles in sums:
            place.add_(of_tiles)
        out.copy_(inner)

    return products, transform
