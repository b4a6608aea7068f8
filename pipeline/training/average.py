"""An exponential moving average of the weights, which is validated and published in their place."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter


class Average:
    """The average of the parts that this rank holds, by name; with a decay of None there is none."""

    def __init__(self, parameters: Mapping[str, Parameter], decay: float | None):
        self._decay = decay
        self._weights = [one.detach() for one in parameters.values()] if decay is not None else []
        self.parts: dict[str, Tensor] = {} if decay is None else {name: one.detach().clone() for name, one in parameters.items()}

    def update(self) -> None:
        """Move towards the weights after a step."""
        if self._decay is not None:
            torch._foreach_lerp_(list(self.parts.values()), self._weights, 1 - self._decay)  # pyright: ignore

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Put the average in the place of the weights for a while."""
        if self._decay is None:
            yield
            return
        kept = [one.clone() for one in self._weights]
        torch._foreach_copy_(self._weights, list(self.parts.values()))  # pyright: ignore
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, kept)  # pyright: ignore
