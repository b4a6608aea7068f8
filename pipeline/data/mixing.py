"""mixup and cutmix: every image of a lane is mixed with the one before it, and so are their labels; a function of (seed, epoch, lane)."""

from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config.sections import Mix
from pipeline.data.augment import Drawn

# As the recipes of torchvision's references have it. For cutmix it is 1: any share is as likely.
MIXUP_ALPHA = 0.2
NAMES: tuple[str, ...] = get_args(Mix)
# Images and labels, the samples' indices on the same device, and the epoch; returns images, and for each a share of each class.
Mixing = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def build(names: str | Sequence[str], seed: int, count: int, classes: int) -> Mixing | None:
    """Return what mixes the images of a lane, or None if nothing is to; of mixup and cutmix, each image has one."""
    chosen = [] if isinstance(names, str) else [name for name in names if name in NAMES]
    return Mixed(chosen, Drawn(seed, count, "mix", draw(chosen)), classes) if chosen else None


def draw(names: list[str]) -> Callable[[int, int, torch.Generator], Tensor]:
    """Draw for each sample what it keeps of every pixel and of its label, and the edges of the box that it keeps nothing of."""

    def drawn(count: int, side: int, source: torch.Generator) -> Tensor:
        random = np.random.Generator(np.random.PCG64(int(torch.randint(2**62, (), generator=source))))
        kept = random.beta(MIXUP_ALPHA, MIXUP_ALPHA, count)
        # The smaller share is the other image's: else some would be seen twice and others never.
        kept = np.maximum(kept, 1 - kept).round(4)
        # A box around any point, as long as its part of the area needs it to be, and cut off at the edges.
        middle, half = random.random((2, count)) * side, np.sqrt(1 - random.random(count)) * side / 2
        start, end = ((middle + sign * half).astype(np.int64).clip(0, side) for sign in (-1, 1))
        area = (end - start).prod(0)
        cut = np.full(count, names == ["cutmix"]) if len(names) == 1 else random.random(count) < 0.5
        columns = [np.where(cut, 1, kept), np.where(cut, 1 - area / side**2, kept), *(np.where(cut, one, 0) for one in (*start, *end))]
        return torch.from_numpy(np.stack(columns, 1)).float()

    return drawn


class Mixed:
    """Mixes the images of a lane."""

    def __init__(self, names: list[str], draws: Drawn, classes: int):
        self.names, self._draws, self._classes = names, draws, classes

    def __call__(self, images: Tensor, labels: Tensor, samples: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        kept, share, top, left, bottom, right = self._draws(samples, epoch, images.shape[-1]).unbind(1)
        places = torch.arange(images.shape[-1], device=images.device)
        rows, columns = ((places >= start[:, None]) & (places < end[:, None]) for start, end in ((top, bottom), (left, right)))
        own = torch.where(rows[:, None, :, None] & columns[:, None, None, :], 0.0, kept[:, None, None, None])
        others = images.roll(1, 0).float()
        # One that is kept whole stays as it is.
        mixed = (others + (images.float() - others) * own).round_().to(torch.uint8)
        classes = F.one_hot(labels, self._classes).float()
        before = classes.roll(1, 0)
        return mixed, before + (classes - before) * share[:, None]
