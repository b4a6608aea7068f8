"""Fused optimizers on a CPU compute a tensor in SIMD vectors and its last few elements one by one; both round differently.

A share ends elsewhere than its tensor. Here the elements for which that makes a difference are updated once more, as the whole
tensor's would be, so that nobody can tell from its bits where a share ends.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


def vector_elements() -> int:
    """How many fp32 elements torch's CPU kernels compute at once."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def one_by_one(whole: Tensor) -> Tensor:
    """True for the elements of a dense tensor that are computed one by one: the last ones in memory."""
    places = torch.arange(whole.numel()).as_strided(whole.shape, whole.stride())
    return places >= whole.numel() - whole.numel() % vector_elements()


@dataclass(frozen=True)
class Piece:
    """Some elements of a share, and a tensor in which they are computed otherwise than in the share."""

    share: Parameter
    places: Tensor
    alone: Parameter

    def take(self, values: Tensor) -> Tensor:
        """These elements of a tensor that belongs to the share."""
        taken = torch.zeros_like(self.alone)
        taken[: len(self.places)] = values.view(-1)[self.places]
        return taken

    def give(self, values: Tensor, to: Tensor) -> None:
        """Put them back."""
        to.view(-1)[self.places] = values[: len(self.places)]


class Remainders:
    """The elements of this rank's shares that end up on the other side, and an optimizer of their own."""

    def __init__(self, shares: Mapping[str, Parameter], singles: Mapping[str, Tensor], optimizer: Optimizer):
        self._pieces = [piece for name, share in shares.items() for piece in pieces(share, singles[name])]
        if not self._pieces:
            return
        self._optimizer, self._own = optimizer, type(optimizer)([one.alone for one in self._pieces], fused=True)  # pyright: ignore
        optimizer.register_step_pre_hook(lambda *_: self._before())
        optimizer.register_step_post_hook(lambda *_: self._after())

    @torch.no_grad()
    def _before(self) -> None:
        """Take what they were before the update."""
        (group,), (own,) = self._optimizer.param_groups, self._own.param_groups
        own.update({key: value for key, value in group.items() if key != "params"})
        self._own.found_inf = self._optimizer.found_inf  # pyright: ignore
        for one in self._pieces:
            one.alone.copy_(one.take(one.share.detach()))
            one.alone.grad = None if one.share.grad is None else one.take(one.share.grad)
            self._own.state[one.alone] = {
                key: value.clone() if value.shape != one.share.shape else one.take(value)
                for key, value in self._optimizer.state.get(one.share, {}).items()
            }

    @torch.no_grad()
    def _after(self) -> None:
        """Update them, and put them in the place of what the share's update made of them."""
        self._own.step()
        for one in self._pieces:
            one.give(one.alone, one.share)
            for key, value in self._own.state[one.alone].items():
                if value.shape == one.alone.shape:
                    one.give(value, self._optimizer.state[one.share][key])


def pieces(share: Parameter, singles: Tensor) -> Iterator[Piece]:
    """What is computed one by one in the whole and in a vector here, and the other way round."""
    here = torch.zeros(share.numel(), dtype=torch.bool)
    here[share.numel() - share.numel() % vector_elements() :] = True
    there = singles.flatten()
    for elements, size in ((there & ~here, None), (here & ~there, vector_elements())):
        places = elements.nonzero().flatten()
        if len(places):
            yield Piece(share, places, Parameter(torch.zeros(size or len(places))))
