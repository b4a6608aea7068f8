"""Augmentation: draws that are a function of (seed, epoch, sample), applied to a whole batch at once."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.order import generator

PAD = 4


class Augment(Protocol):
    """Augments uint8 images, given their samples' indices on the same device and the epoch."""

    def __call__(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor: ...


def build(name: str, seed: int, count: int) -> Augment:
    """Return the named augmentation for a training set of `count` samples."""
    return {"none": lambda: _none, "crop-flip": lambda: CropFlip(seed, count)}[name]()


def _none(images: Tensor, samples: Tensor, epoch: int) -> Tensor:
    return images


class CropFlip:
    """A random crop after padding by 4, and a random horizontal flip."""

    def __init__(self, seed: int, count: int):
        self._seed, self._count = seed, count
        self._epoch = -1
        self._shifts = self._flips = torch.empty(0)

    def __call__(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        if epoch != self._epoch:
            # All samples' draws of the epoch at once, so that they do not depend on which lane or rank takes a sample.
            source = generator(self._seed, "crop-flip", epoch)
            self._shifts = torch.randint(2 * PAD + 1, (self._count, 2), generator=source).to(images.device)
            self._flips = torch.randint(2, (self._count,), generator=source, dtype=torch.bool).to(images.device)
            self._epoch = epoch
        shifts, flips = self._shifts[samples], self._flips[samples]
        height, width = images.shape[2:]
        rows = shifts[:, 0, None] + torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device)
        columns = shifts[:, 1, None] + torch.where(flips[:, None], columns.flip(0), columns)
        padded = F.pad(images, (PAD, PAD, PAD, PAD))
        batch = torch.arange(len(images), device=images.device)[:, None, None, None]
        channel = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
        return padded[batch, channel, rows[:, None, :, None], columns[:, None, None, :]]
