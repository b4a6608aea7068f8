"""Batches on the device: gathered and transformed as a whole, from the device's memory if the data fit, else read ahead from disk."""

import mmap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.data import Split
from pipeline.data.augment import Augment
from pipeline.data.mixing import Mixing
from pipeline.data.order import Order
from pipeline.data.originals import Originals


class Pixels:
    """Turns uint8 images into normalized floats on the model's device."""

    def __init__(self, mean: list[float], std: list[float], device: torch.device):
        self.device = device
        self._mean, self._std = (torch.tensor(values, device=device)[None, :, None, None] for values in (mean, std))
        # By a number, a GPU would multiply with the reciprocal: other bits than a CPU's, and than the published model's.
        self._white = torch.tensor(255.0, device=device)

    def __call__(self, images: Tensor) -> Tensor:
        # Elementwise, so the batch's shape cannot change a bit.
        scaled = images.to(self.device).float().div_(self._white).sub_(self._mean).div_(self._std)
        return scaled.contiguous(memory_format=torch.channels_last)


def balanced(labels: NDArray[np.int64], device: torch.device) -> Tensor:
    """A weight for each class, by which all classes weigh the same; over all images their mean is 1."""
    counts = np.bincount(labels)
    return torch.tensor(len(labels) / (len(counts) * counts), dtype=torch.float32, device=device)


def resident(splits: list[Split], free_bytes: int) -> bool:
    """Return True if the splits are pixels and fit together into half of the device's free memory."""
    packed = not any(isinstance(split.images, Originals) for split in splits)
    return packed and sum(split.images.nbytes for split in splits) <= free_bytes // 2


class Batches:
    """The lanes of a training split, in any order; where data stay on disk, the next lane of this rank is read ahead."""

    def __init__(self, split: Split, order: Order, augment: Augment, pixels: Pixels, hold: bool, mixing: Mixing | None = None):
        self._order, self._augment, self._mixing, self._pixels = order, augment, mixing, pixels
        # Which lanes of a step are read ahead.
        self.own = range(1)
        self._images = split.images if isinstance(split.images, Originals) else torch.from_numpy(split.images)
        self._labels = torch.from_numpy(split.labels)
        self._reader = None if hold else ThreadPoolExecutor(max_workers=1)
        if not hold and isinstance(split.images, np.memmap):
            # The kernel would read neighbours too, which are wanted much later.
            split.images._mmap.madvise(mmap.MADV_RANDOM)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
        self._ahead: tuple[tuple[int, int], Future[tuple[Tensor, Tensor]]] | None = None
        if hold and not isinstance(self._images, Originals):
            self._images = self._images.to(pixels.device)
            self._labels = self._labels.to(pixels.device)

    def lane(self, step: int, lane: int) -> tuple[Tensor, Tensor]:
        """Return the images of one lane, ready for the model, and their labels: numbers, or shares of each class where images are mixed."""
        images, labels = (one.to(self._pixels.device, non_blocking=True) for one in self._read(step, lane))
        samples, epoch = self._order.lane(step, lane, self._pixels.device), self._order.epoch(step)
        images = self._augment(images, samples, epoch)
        if self._mixing is not None:
            images, labels = self._mixing(images, labels, samples, epoch)
        return self._pixels(images), labels

    def _gather(self, step: int, lane: int) -> tuple[Tensor, Tensor]:
        samples = self._order.lane(step, lane, self._labels.device)
        images, labels = taken(self._images, samples), self._labels.index_select(0, samples)
        if self._pixels.device.type == "cuda" and self._reader is not None:
            return images.pin_memory(), labels.pin_memory()
        return images, labels

    def _read(self, step: int, lane: int) -> tuple[Tensor, Tensor]:
        if self._reader is None:
            return self._gather(step, lane)
        ready = self._ahead[1] if self._ahead and self._ahead[0] == (step, lane) else self._reader.submit(self._gather, step, lane)
        following = (step, lane + 1) if lane + 1 in self.own else (step + 1, self.own.start)
        result = ready.result()
        self._ahead = following, self._reader.submit(self._gather, *following)
        return result


def taken(images: Tensor | Originals, samples: Tensor) -> Tensor:
    """These images, as they lie in memory, or decoded."""
    return images.index_select(0, samples) if isinstance(images, Tensor) else torch.from_numpy(images[samples.numpy()])


def chunks(count: int, size: int) -> Iterator[slice]:
    """Cut a split into chunks of a fixed size, the last one shorter: the cut never depends on the ranks."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
