"""A model is evaluated for a while, and then as it was, however that ends."""

import pytest
from torch import nn

from pipeline.training.evaluation import evaluating


class Merging(nn.Linear):
    """As adapters do: merged into the weights while it is evaluated."""

    merged = False

    def train(self, mode: bool = True) -> "Merging":
        self.merged = not mode
        super().train(mode)
        return self


@pytest.mark.parametrize("fails", [False, True])
def test_modules_are_told_and_frozen_ones_stay_as_they_were(fails: bool) -> None:
    frozen, adapter = nn.BatchNorm1d(2), Merging(2, 2)
    model = nn.Sequential(adapter, frozen, nn.BatchNorm1d(2))
    frozen.eval()

    def evaluate() -> None:
        with evaluating(model):
            assert adapter.merged
            assert not any(one.training for one in model.modules())
            if fails:
                raise RuntimeError("a rank is lost")

    if fails:
        with pytest.raises(RuntimeError, match="a rank is lost"):
            evaluate()
    else:
        evaluate()
    assert not adapter.merged
    assert [one.training for one in model] == [True, False, True]
