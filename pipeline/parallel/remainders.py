"""Fused optimizers on a CPU compute a tensor in SIMD vectors and its remainder, the last few elements, by other instructions.

Both round differently, and a share has another remainder than its tensor. The elements of both remainders are updated once more,
as the whole tensor's are, so that no bit tells where a share ends.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


def vector_elements() -> int:
    """How many fp32 elements torch's CPU kernels compute at once."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def remainder(whole: Tensor) -> Tensor:
    """For each element of a dense tensor its place in the remainder, which is the last in memory; -1 for those in vectors."""
    places = torch.arange(whole.numel()).as_strided(whole.shape, whole.stride())
    return (places - (whole.numel() - whole.numel() % vector_elements())).clamp(min=-1).to(torch.int8)


@dataclass(frozen=True)
class Piece:
    """Some elements of a share, and a tensor in which they are computed otherwise than in the share."""

    share: Parameter
    # Where they are in the share, and in the other tensor.
    here: Tensor
    there: Tensor
    alone: Parameter

    def take(self, values: Tensor) -> Tensor:
        """These elements of a tensor that belongs to the share."""
        taken = torch.zeros_like(self.alone)
        taken[self.there] = values.view(-1)[self.here]
        return taken

    def give(self, values: Tensor, to: Tensor) -> None:
        """Put them back."""
        to.view(-1)[self.here] = values[self.there]


class Remainders:
    """The elements of remainders that this rank has, and an optimizer of their own."""

    def __init__(self, shares: Iterable[tuple[Parameter, Tensor, int]], optimizer: Optimizer):
        self._pieces = [piece for share in shares for piece in pieces(*share)]
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
        self._own.found_inf = getattr(self._optimizer, "found_inf", None)  # pyright: ignore
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


def pieces(share: Parameter, places: Tensor, remainder_elements: int) -> Iterator[Piece]:
    """What belongs to the whole tensor's remainder, at its place in it, and what is in a vector there and not here."""
    there, here = places.flatten().long(), torch.arange(share.numel())
    single = (there >= 0).nonzero().flatten()
    if len(single):
        yield Piece(share, single, there[single], Parameter(torch.zeros(remainder_elements)))
    last = share.numel() - share.numel() % vector_elements()
    vector = ((here >= last) & (there < 0)).nonzero().flatten()
    if len(vector):
        yield Piece(share, vector, torch.arange(len(vector)), Parameter(torch.zeros(vector_elements())))
