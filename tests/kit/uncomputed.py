"""Convolutions of many shapes, in memory that was filled beforehand: `MALLOC_PERTURB_=128 python -m tests.kit.uncomputed`.

Ends with 1 and names those that make, or differentiate to, something else than in double precision.
"""

import copy
import random
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeline.models import cpu_layers
from pipeline.models.cpu_layers import MANY_WEIGHTS, replace_kernels

SHAPES = 400
# What glibc fills memory with: 3.4e38 as fp32 or bf16.
POISON = 128 ^ 255
# Of the norm; what nothing computed is off by far more.
NEAR = {torch.bfloat16: 0.06, torch.float32: 1e-3}


def shapes(source: random.Random) -> Iterator[tuple[nn.Conv2d, Tensor]]:
    """Layers and images; many windows reach beyond their maps."""
    while True:
        groups = source.choice([1, 1, 2, 16])
        entering, leaving = source.choice([16, 32, 48, 17 if groups == 1 else 16]), source.choice([16, 32, 48])
        window = source.choice([1, 2, 3, 5, 7]), source.choice([1, 3, 5])
        stride = source.choice([1, 2, 3]), source.choice([1, 2, 3])
        dilation = source.choice([1, 1, 2, 5])
        padding = [source.choice([0, side // 2 * dilation, (side - 1) * dilation]) for side in window]
        height, width = (source.choice([1, 1, 2, 3, 4, 7, 14, 50]) for _ in range(2))
        if all(length + 2 * border > dilation * (side - 1) for length, border, side in zip((height, width), padding, window, strict=True)):
            layer = nn.Conv2d(entering, leaving, window, stride, tuple(padding), dilation, groups)  # pyright: ignore[reportArgumentType]
            yield layer.to(memory_format=torch.channels_last), torch.randn(6, entering, height, width)  # pyright: ignore[reportCallIssue]


def computed(layer: nn.Conv2d, images: Tensor, bf16: bool) -> list[Tensor]:
    """What comes out, and the gradients, in double precision."""
    images = images.contiguous(memory_format=torch.channels_last).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        found = layer(images)
    gradients = torch.autograd.grad(found.double().square().sum(), [images, *layer.parameters()])
    return [one.detach().double() for one in (found, *gradients)]


def wrong(layer: nn.Conv2d, images: Tensor, expected: list[Tensor]) -> bool:
    """Whether something is far from what it should be, in fp32 or in bf16."""
    for dtype, near in NEAR.items():
        found = computed(layer, images.clone(), dtype == torch.bfloat16)
        # No gradient has a norm of nearly nothing, but those that are zero.
        if not all((own - full).norm() <= near * full.norm().clamp(min=1e-2) for own, full in zip(found, expected, strict=True)):
            return True
    return False


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if not (torch.empty(1000, dtype=torch.uint8) == POISON).all():
        sys.exit("memory is not filled before it is given out: set MALLOC_PERTURB_=128 (glibc)")
    found, theirs = shapes(random.Random(1)), 0
    ours: list[nn.Conv2d] = []
    for number in range(SHAPES):
        # These are small layers; every other one is computed as large ones are.
        cpu_layers.MANY_WEIGHTS = 1 if number % 2 else MANY_WEIGHTS
        layer, images = next(found)
        expected = computed(copy.deepcopy(layer).double(), images.double(), False)
        theirs += wrong(layer, images, expected)
        replace_kernels(layer)
        if wrong(layer, images, expected):
            print(f"wrong on images of {tuple(images.shape)}: {layer}")
            ours.append(layer)
    print(f"wrong of {SHAPES} convolutions: with torch's kernels {theirs}, with ours {len(ours)}")
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main())
