"""An exponential moving average of the weights, and of what BatchNorm has seen; it is validated and published in their place."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Average:
    """The average of the parts that this rank holds, by name; with a decay of None there is none."""

    def __init__(self, parts: Mapping[str, Tensor], decay: float | None):
        self._decay = decay
        kept = {} if decay is None else {name: one.detach() for name, one in parts.items() if one.is_floating_point()}
        self._current = list(kept.values())
        self.parts = {name: one.clone() for name, one in kept.items()}

    def update(self, step: int) -> None:
        """Move towards the weights after a step; by larger shares in the first steps, or the initial weights would stay in it for long."""
        if self._decay is not None:
            decay = min(self._decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(self.parts.values()), self._current, 1 - decay)  # pyright: ignore

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Put the average in the place of the weights for a while."""
        if self._decay is None:
            yield
            return
        kept = [one.clone() for one in self._current]
        torch._foreach_copy_(self._current, list(self.parts.values()))  # pyright: ignore
        try:
            yield
        finally:
            torch._foreach_copy_(self._current, kept)  # pyright: ignore
