"""Which samples a step takes: a function of (seed, epoch, step, lane), never a state."""

from functools import lru_cache

import torch
from torch import Tensor

from pipeline.config import draw_seed

HOST = torch.device("cpu")


def generator(seed: int, *key: object) -> torch.Generator:
    """Return a CPU generator seeded by (seed, key)."""
    return torch.Generator().manual_seed(draw_seed(seed, *key))


class Order:
    """The samples of every lane of every step; the ragged tail of an epoch is dropped, so every lane has one shape."""

    def __init__(self, seed: int, count: int, global_batch: int, pieces: int):
        assert global_batch % pieces == 0
        self.steps_per_epoch = count // global_batch
        self._seed, self._count, self._global_batch = seed, count, global_batch
        self._lane_size = global_batch // pieces
        # Two epochs where one is being read ahead, on the host and on a device.
        self._permutation = lru_cache(maxsize=4)(self._permute)

    def _permute(self, epoch: int, device: torch.device) -> Tensor:
        return torch.randperm(self._count, generator=generator(self._seed, "order", epoch)).to(device)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def lane(self, step: int, lane: int, device: torch.device = HOST) -> Tensor:
        """Return the indices of the samples of one lane; an epoch's are copied to a device once."""
        start = step % self.steps_per_epoch * self._global_batch + lane * self._lane_size
        return self._permutation(self.epoch(step), device)[start : start + self._lane_size]
