"""Clipping by the norm of all gradients together."""

import torch
from torch import Tensor
from torch.nn import Parameter

from pipeline.ranks import Ranks
from pipeline.training.state import State


class Clipping:
    """Scales gradients down to a norm, with the same bits on any number of ranks, whichever part of the gradients they hold."""

    def __init__(self, state: State, ranks: Ranks, most: float | None):
        self._most, self._ranks, self._sharded = most, ranks, state.sharded
        self._parameters: list[Parameter] = [one for group in state.optimizer.param_groups for one in group["params"]]
        self._counted = state.counted
        self._per_rank: list[int] = []
        self._norm: Tensor | None = None

    def __call__(self) -> None:
        """Clip; nothing waits for the norm."""
        if self._most is None:
            return
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        counted = [one.grad for one in self._counted if one.grad is not None]
        # A row is never shared out.
        rows = [squares(one.flatten(1) if one.ndim > 1 else one.view(-1, 1)) for one in counted]
        rows = torch.cat([torch.empty(0, device=self._parameters[0].device), *rows])
        if self._sharded:
            rows = self._of_all_ranks(rows)
        # Sorted, so that the sum does not depend on who had which.
        self._norm = rows.double().sort().values.sum().sqrt()
        scale = (self._most / (self._norm + 1e-6)).clamp(max=1).float()
        torch._foreach_mul_(gradients, scale)  # pyright: ignore

    def _of_all_ranks(self, rows: Tensor) -> Tensor:
        if not self._per_rank:
            self._per_rank = self._ranks.gather_rows(torch.tensor([len(rows)], device=rows.device), [1] * self._ranks.size).tolist()
        return self._ranks.gather_rows(rows, self._per_rank)

    def figures(self) -> dict[str, float]:
        """Return the norm that the last gradients had before, if they were to be clipped."""
        return {} if self._norm is None else {"train/gradient_norm": self._norm.item()}


def squares(rows: Tensor) -> Tensor:
    """Sum each row's squares, by halves: additions of elements, whose order no number of rows and no device can change."""
    sums = rows.float().square()
    while (columns := sums.shape[1]) > 1:
        half = (columns + 1) // 2
        sums[:, : columns - half] += sums[:, half:]
        sums = sums[:, :half]
    return sums[:, 0]
