"""A model whose convolutions are of a class of their own: every strategy computes what one process does."""

import pytest
from torch import Tensor, nn

from pipeline import models
from tests.ranks.test_strategies import with_strategy


class Doubled(nn.Conv2d):
    """Computes with other weights than it holds, as layers with standardized weights do."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self._conv_forward(input, self.weight * 2, self.bias)


def made(*_: object) -> nn.Module:
    """Down to maps of one pixel, where kernels in bf16 leave gradients uncomputed."""
    layers = [Doubled(1, 8, 3, 2, 1), nn.ReLU(), Doubled(8, 16, 3, 2, 1), nn.ReLU(), Doubled(16, 32, 3, 2, 1), nn.ReLU()]
    layers += [Doubled(32, 32, 3, 2, 1), nn.ReLU(), Doubled(32, 32, 5, padding=2), nn.Flatten(), nn.Linear(32, 10)]
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
