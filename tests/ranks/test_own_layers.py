"""Convolutions of a subclass, and those that other CPUs compute otherwise: strategies that promise bits compute what one process does."""

import pytest
import torch
from torch import Tensor, nn

from pipeline import models
from pipeline.hardware import machine
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


def trained(group, strategy: str, per_rank: list[int], name: str, bf16: bool, fast_products: bool) -> str:
    """The digest of gradients after some steps, on a CPU of that kind."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(machine, "fast_fp32_products", lambda: fast_products)
        if name == "own":
            patched.setattr(models, "build", made)
        return with_strategy(group, strategy, "ordered", name, per_rank, bf16)[0]


CASES = [("own", False, True), ("own", False, False), ("own", True, True), ("resnet18", False, True), ("resnet18", False, False)]


@pytest.mark.parametrize("case", CASES, ids=["fp32", "fp32, slow products", "bf16", "resnet18", "resnet18, slow products"])
def test_every_strategy_has_the_same_bits(case: tuple[str, bool, bool], run_ranks) -> None:
    ((expected,),) = run_ranks(1, (trained, ("ddp", [4], *case)))
    strategies = ("ddp", "allreduce", "fsdp", "pipeline")
    found = run_ranks(2, *((trained, (strategy, [2, 2], *case)) for strategy in strategies))
    assert found == [[expected] * len(strategies)] * 2
