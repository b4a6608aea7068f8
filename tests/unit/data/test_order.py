"""The order of samples: a function of (seed, epoch, step, lane), which no change of this code may change."""

import pytest
import torch

from pipeline.config import draw_seed
from pipeline.data.order import Order, generator


def test_a_lane_is_a_slice_of_the_permutation_of_its_epoch() -> None:
    order = Order(seed=5, count=103, global_batch=20, pieces=4)
    assert order.steps_per_epoch == 5
    for step in (0, 4, 5, 13):
        assert order.epoch(step) == step // 5
        permutation = torch.randperm(103, generator=torch.Generator().manual_seed(draw_seed(5, "order", step // 5)))
        for lane in range(4):
            first = step % 5 * 20 + lane * 5
            assert order.lane(step, lane).tolist() == permutation[first : first + 5].tolist()


def test_the_order_is_the_one_of_earlier_versions() -> None:
    """A checkpoint goes on with the samples that its run would have taken next."""
    order = Order(seed=5, count=103, global_batch=20, pieces=4)
    assert [order.lane(step, 1).tolist() for step in (0, 7)] == [[29, 70, 9, 56, 83], [45, 99, 30, 2, 0]]


def test_every_purpose_has_draws_of_its_own() -> None:
    drawn = {
        torch.rand(4, generator=generator(*key)).sum().item() for key in ((1, "order", 0), (1, "order", 1), (2, "order", 0), (1, "crop", 0))
    }
    assert len(drawn) == 4
    assert torch.equal(torch.rand(4, generator=generator(1, "order", 0)), torch.rand(4, generator=generator(1, "order", 0)))


def test_a_purpose_leaves_the_draws_of_others_alone() -> None:
    torch.manual_seed(7)
    generator(1, "order", 0)
    assert torch.initial_seed() == 7


def test_lanes_of_unequal_size_are_refused() -> None:
    with pytest.raises(AssertionError):
        Order(seed=5, count=103, global_batch=20, pieces=3)
