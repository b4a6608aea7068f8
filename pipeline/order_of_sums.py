"""Whether kernels sum up several lanes at once in the order in which they sum up one: which kernel is taken goes by sizes.

It is tried with sums of numbers that cancel each other: what is left of them is what was rounded, and another order leaves something else.
Other numbers would hide most of it, above all in bf16.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Where a tensor of its own begins.
ALIGNED_BYTES = 64
# Of more it would take long, and they gain nothing.
MOST_WEIGHTS = 1 << 22
Shape = tuple[int, ...]
# Of a convolution: stride, padding, dilation, groups.
Settings = tuple[Any, Any, Any, int]


@dataclass(frozen=True)
class Form:
    """What kernels are chosen by."""

    shape: Shape
    strides: Shape
    dtype: torch.dtype

    def of(self, values: Tensor) -> Tensor:
        """These values in this form."""
        if 0 in self.strides:
            return values.to(self.dtype).contiguous(memory_format=torch.channels_last)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype).copy_(values)


def form(one: Tensor) -> Form:
    """The form of a tensor."""
    return Form(tuple(one.shape), one.stride(), one.dtype)


def pieces(lanes: int, *of: Tensor) -> list[tuple[Tensor, ...]]:
    """Each lane's part of tensors, in memory that begins as that of a tensor of its own: products may round by where it does."""
    if lanes == 1:
        return [of]
    cut: list[Sequence[Tensor]] = []
    for one in of:
        parts: Sequence[Tensor] = one.chunk(lanes)
        apart_bytes = one.stride(0) * len(parts[0]) * one.element_size()
        aligned = one.data_ptr() % ALIGNED_BYTES == apart_bytes % ALIGNED_BYTES == 0
        cut.append(parts if aligned else [part.clone() for part in parts])
    return list(zip(*cut, strict=True))


def joined(parts: list[Tensor]) -> Tensor:
    """Parts as one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@cache
def convolutions_alike(images: Form, weight: Form, biased: bool, settings: Settings, lanes: int) -> bool:
    """Whether a convolution does, of all lanes' images."""
    if math.prod(weight.shape) > MOST_WEIGHTS:
        return False
    source, bias = torch.Generator().manual_seed(1), torch.zeros(weight.shape[0], dtype=weight.dtype) if biased else None
    kernels, given = weight.of(cancelling(weight.shape, False, settings[3], source)), images.of(constant(images.shape, source))
    return alike(lambda part: F.conv2d(part, kernels, bias, *settings), lanes, given)


@cache
def gradients_alike(images: Form, weight: Form, settings: Settings, lanes: int) -> bool:
    """Whether the gradient of a convolution's images does."""
    if math.prod(weight.shape) > MOST_WEIGHTS:
        return False
    source = torch.Generator().manual_seed(1)
    kernels = weight.of(cancelling(weight.shape, True, settings[3], source))
    made = F.conv2d(torch.empty(images.shape, device="meta"), torch.empty(weight.shape, device="meta"), None, *settings).shape
    gradient = constant(made, source).to(images.dtype).contiguous(memory_format=torch.channels_last)
    some = images.of(torch.zeros(images.shape))
    return alike(lambda *parts: gradient_of_images(parts[0], parts[1], kernels, settings), lanes, gradient, some)


@cache
def products_alike(rows: Shape, weight: Shape, dtype: torch.dtype, biased: bool, lanes: int) -> bool:
    """Whether a linear layer does, of all lanes' rows."""
    if math.prod(weight) > MOST_WEIGHTS:
        return False
    source, bias = torch.Generator().manual_seed(1), torch.zeros(weight[0], dtype=dtype) if biased else None
    matrix, given = cancelling(weight, False, 1, source).to(dtype), constant(rows, source).to(dtype)
    return alike(partial(F.linear, weight=matrix, bias=bias), lanes, given)


@cache
def gradients_of_rows_alike(gradients: Shape, weight: Shape, dtype: torch.dtype, lanes: int) -> bool:
    """Whether the gradient of its rows does."""
    if math.prod(weight) > MOST_WEIGHTS:
        return False
    source = torch.Generator().manual_seed(1)
    matrix, given = cancelling(weight, True, 1, source).to(dtype), constant(gradients, source).to(dtype)
    return alike(lambda part: part.mm(matrix), lanes, given)


def alike(compute: Callable[..., Tensor], lanes: int, *of: Tensor) -> bool:
    """Whether all lanes come to the same at once as each by itself; where nothing is left, nothing can be told."""
    together = compute(*of)
    return bool(together.count_nonzero()) and torch.equal(together, torch.cat([compute(*part) for part in pieces(lanes, *of)]))


def cancelling(weight: Shape, outputs: bool, groups: int, source: torch.Generator) -> Tensor:
    """Weights of very different sizes, in pairs that cancel each other: in each sum over a group's inputs, or over its outputs.

    Where it has one of them, so do the pixels of a window. Which are a pair is drawn: halves may be summed by themselves.
    """
    found = torch.randn(weight, generator=source) * 2.0 ** torch.randint(-8, 9, weight, generator=source, dtype=torch.int8)
    of_groups = found.view(groups, -1, *weight[1:])
    summed = 1 if outputs else 2
    pairs = of_groups.flatten(3).movedim(3, 0) if of_groups.shape[summed] == 1 and len(weight) > 2 else of_groups.movedim(summed, 0)
    order, half = torch.randperm(len(pairs), generator=source), len(pairs) // 2
    pairs[order[half : 2 * half]] = -pairs[order[:half]]
    pairs[order[2 * half :]] = 0
    return found


def constant(shape: Shape, source: torch.Generator) -> Tensor:
    """A number for each image or row."""
    return (1 + torch.rand(shape[0], *[1] * (len(shape) - 1), generator=source)).expand(shape).contiguous()


def gradient_of_images(gradient: Tensor, images: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """What torch's own convolution gives its images."""
    stride, padding, dilation, groups = settings
    back: Any = torch.ops.aten.convolution_backward
    found: Tensor = back(gradient, images, weight, None, stride, padding, dilation, False, (0, 0), groups, (True, False, False))[0]
    return found
