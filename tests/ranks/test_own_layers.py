"""A model whose convolutions are of a subclass: strategies that promise bits compute what one process does."""

import pytest
import torch
from torch import Tensor, nn

from pipeline import models
from tests.ranks.test_strategies import with_strategy


class Standardized(nn.Conv2d):
    """Computes with other weights than it holds, whose mean and spread depend on the order of sums."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        spread, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        return self._conv_forward(input, (self.weight - mean) / spread, self.bias)


def made(*_: object) -> nn.Module:
    """Down to maps of one pixel, where kernels in bf16 leave gradients uncomputed."""
    layers = [Standardized(1, 8, 3, 2, 1), nn.ReLU(), Standardized(8, 16, 3, 2, 1), nn.ReLU(), Standardized(16, 32, 3, 2, 1), nn.ReLU()]
    layers += [Standardized(32, 32, 3, 2, 1), nn.ReLU(), Standardized(32, 32, 5, padding=2), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*layers)


def trained(group, strategy: str, per_rank: list[int], bf16: bool) -> str:
    """The digest of gradients after some steps."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(models, "build", made)
        return with_strategy(group, strategy, "ordered", "own", per_rank, bf16)[0]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_every_strategy_has_the_same_bits(bf16: bool, run_ranks) -> None:
    ((expected,),) = run_ranks(1, (trained, ("ddp", [4], bf16)))
    strategies = ("ddp", "allreduce", "fsdp", "pipeline")
    found = run_ranks(2, *((trained, (strategy, [2, 2], bf16)) for strategy in strategies))
    assert found == [[expected] * len(strategies)] * 2
