"""Augmentation: draws that are a function of (seed, epoch, sample), applied to a whole batch at once, on its device.

What is computed of an image is computed of its pixels one by one, or in whole numbers: neither the batch it is in nor its place there
can change a bit of it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import ConfigError
from pipeline.data.order import generator

PAD = 4
# As torchvision's RandomResizedCrop, RandomErasing and ColorJitter have them.
CROP_AREA, CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
ERASED_SHARE, ERASED_AREA, ERASED_RATIO = 0.5, (0.02, 0.33), (0.3, 3.3)
STRENGTH = 0.4
# Of red, green and blue in grey, as torchvision has them.
GREY = (0.2989, 0.587, 0.114)
# A row for each of so many samples, whose images have so many pixels a side.
Draw = Callable[[int, int, torch.Generator], Tensor]


class Augment(Protocol):
    """Augments uint8 images, given their samples' indices on the same device and the epoch."""

    def __call__(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor: ...


def build(names: str | Sequence[str], seed: int, count: int, mean: list[float]) -> Augment:
    """Return the named augmentation, or several one after the other, for a training set of `count` samples of this mean."""
    kinds: dict[str, Callable[[], Augment]] = {
        "none": lambda: _none,
        "crop-flip": lambda: CropFlip(seed, count),
        "crop": lambda: Crop(Drawn(seed, count, "crop", _shifts)),
        "flip": lambda: Flip(Drawn(seed, count, "flip", _flips)),
        "resized-crop": lambda: ResizedCrop(Drawn(seed, count, "resized-crop", _rectangles(CROP_AREA, CROP_RATIO))),
        "colour-jitter": lambda: ColourJitter(Drawn(seed, count, "colour-jitter", _factors)),
        "erasing": lambda: Erasing(Drawn(seed, count, "erasing", _erased), mean),
    }
    if "colour-jitter" in names and len(mean) not in (1, 3):
        raise ConfigError(f"data.augment: colour-jitter is for images of 1 or 3 channels, these have {len(mean)}; leave it out")
    if isinstance(names, str):
        return kinds[names]()
    # Those that mix two images are not among them.
    parts = [kinds[name]() for name in names if name in kinds]

    def in_turn(images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        for part in parts:
            images = part(images, samples, epoch)
        return images

    return in_turn


def _none(images: Tensor, samples: Tensor, epoch: int) -> Tensor:
    return images


def _shifts(count: int, _: int, source: torch.Generator) -> Tensor:
    return torch.randint(2 * PAD + 1, (count, 2), generator=source)


def _flips(count: int, _: int, source: torch.Generator) -> Tensor:
    return torch.randint(2, (count,), generator=source, dtype=torch.bool)


def _factors(count: int, _: int, source: torch.Generator) -> Tensor:
    return 1 - STRENGTH + torch.rand(count, 3, generator=source) * (2 * STRENGTH)


def _rectangles(area: tuple[float, float], ratio: tuple[float, float]) -> Draw:
    """Draw top, left, height and width of a part of each square."""

    def draw(count: int, side: int, source: torch.Generator) -> Tensor:
        draws = torch.rand(4, count, generator=source, dtype=torch.float64)
        share = area[0] + draws[0] * (area[1] - area[0])
        ratios = torch.exp(math.log(ratio[0]) + draws[1] * (math.log(ratio[1]) - math.log(ratio[0])))
        height, width = ((side * torch.sqrt(one)).round().long().clamp(1, side) for one in (share / ratios, share * ratios))
        top, left = ((place * (side - size + 1)).long() for place, size in ((draws[2], height), (draws[3], width)))
        return torch.stack([top, left, height, width], 1)

    return draw


def _erased(count: int, side: int, source: torch.Generator) -> Tensor:
    found = _rectangles(ERASED_AREA, ERASED_RATIO)(count, side, source)
    # In one that stays as it is, nothing is erased.
    found[torch.rand(count, generator=source) >= ERASED_SHARE, 2] = 0
    return found


class Drawn:
    """All samples' draws of an epoch at once, on the host, so that they do not depend on which lane, rank or device takes a sample."""

    def __init__(self, seed: int, count: int, name: str, draw: Draw):
        self._seed, self._count, self._name, self._draw = seed, count, name, draw
        self._epoch, self._values = -1, torch.empty(0)

    def __call__(self, samples: Tensor, epoch: int, side: int) -> Tensor:
        """Return the draws of some samples, on their device."""
        if epoch != self._epoch:
            self._values = self._draw(self._count, side, generator(self._seed, self._name, epoch)).to(samples.device)
            self._epoch = epoch
        return self._values[samples]


class CropFlip:
    """A random crop after padding by 4, and a random horizontal flip."""

    def __init__(self, seed: int, count: int):
        self._seed, self._count = seed, count
        self._epoch = -1
        self._shifts = self._flips = torch.empty(0)

    def __call__(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        if epoch != self._epoch:
            # Both from one generator.
            source = generator(self._seed, "crop-flip", epoch)
            self._shifts = _shifts(self._count, images.shape[-1], source).to(images.device)
            self._flips = _flips(self._count, images.shape[-1], source).to(images.device)
            self._epoch = epoch
        return _cropped(images, self._shifts[samples], self._flips[samples])


class Crop:
    """A random crop after padding by 4."""

    def __init__(self, shifts: Drawn):
        self._shifts = shifts

    def __call__(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        shifts = self._shifts(samples, epoch, images.shape[-1])
        return _cropped(images, shifts, torch.zeros_like(shifts[:, 0], dtype=torch.bool))


def _cropped(images: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
    height, width = images.shape[2:]
    rows = shifts[:, 0, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = shifts[:, 1, None] + torch.where(flips[:, None], columns.flip(0), columns)
    padded = F.pad(images, (PAD, PAD, PAD, PAD))
    batch = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return padded[batch, channel, rows[:, None, :, None], columns[:, None, None, :]]


class Flip:
    """A horizontal flip of every second image."""

    def __init__(self, flips: Drawn):
        self._flips = flips

    def __call__(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        flips = self._flips(samples, epoch, images.shape[-1])
        return torch.where(flips[:, None, None, None], images.flip(3), images)


class ResizedCrop:
    """A part of the image, of random place, area and ratio, stretched to all of it; a part that is too long is cut off."""

    def __init__(self, draws: Drawn):
        self._draws = draws

    def __call__(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        top, left, height, width = self._draws(samples, epoch, images.shape[-1]).unbind(1)
        tall = stretched(images.float(), top, height, 2)
        return stretched(tall, left, width, 3).round_().clamp_(0, 255).to(torch.uint8)


def stretched(images: Tensor, start: Tensor, length: Tensor, dim: int) -> Tensor:
    """Every image's rows or columns from its start on, so many of them, stretched to all: pixels between two are their mixture."""
    side = images.shape[dim]
    # In whole numbers: twice `side` parts of a pixel, from the middle of the first one on.
    parts = ((2 * torch.arange(side, device=images.device) + 1) * length[:, None] - side).clamp_(min=0)
    first, share = parts // (2 * side), (parts % (2 * side)).float() / (2 * side)
    second = torch.minimum(first + 1, length[:, None] - 1)
    shape = [-1, 1, side, 1] if dim == 2 else [-1, 1, 1, side]
    before, after = (images.gather(dim, (start[:, None] + one).view(shape).expand_as(images)) for one in (first, second))
    return before + (after - before) * share.view(shape)


class ColourJitter:
    """Brightness, then contrast, then saturation by random factors from 0.6 to 1.4."""

    def __init__(self, draws: Drawn):
        self._draws = draws

    def __call__(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        factors = self._draws(samples, epoch, images.shape[-1])
        brightness, contrast, saturation = (one[:, None, None, None] for one in factors.unbind(1))
        bright = (images.float() * brightness).clamp_(0, 255)
        # A sum of whole numbers is the same in any order.
        sums = grey(bright).round().long().sum((1, 2, 3), keepdim=True)
        middle = sums.float() / (images.shape[2] * images.shape[3])
        found = (bright * contrast + middle * (1 - contrast)).clamp_(0, 255)
        if images.shape[1] > 1:
            found = (found * saturation + grey(found) * (1 - saturation)).clamp_(0, 255)
        return found.round_().to(torch.uint8)


def grey(images: Tensor) -> Tensor:
    """Images of one channel, in which every colour is as bright as it was."""
    if images.shape[1] == 1:
        return images
    red, green, blue = (images[:, channel : channel + 1] * share for channel, share in enumerate(GREY))
    return red + green + blue


class Erasing:
    """A rectangle of random place, area and ratio in every second image becomes the mean of all images."""

    def __init__(self, draws: Drawn, mean: list[float]):
        self._draws, self._mean = draws, torch.tensor([round(255 * one) for one in mean], dtype=torch.uint8)[None, :, None, None]

    def __call__(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        top, left, height, width = self._draws(samples, epoch, images.shape[-1]).unbind(1)
        places = torch.arange(images.shape[-1], device=images.device)
        rows, columns = ((places >= at[:, None]) & (places < (at + size)[:, None]) for at, size in ((top, height), (left, width)))
        # To the device once.
        self._mean = self._mean.to(images.device)
        return torch.where(rows[:, None, :, None] & columns[:, None, None, :], self._mean, images)
