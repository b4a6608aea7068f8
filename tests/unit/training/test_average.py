"""The average of the weights."""

import torch

from pipeline.training.average import Average
from pipeline.training.state import State
from tests.unit.training.test_checkpoint import descend, parts


def test_it_moves_towards_the_weights_and_the_statistics_by_less_and_less_down_to_one_minus_decay() -> None:
    state = State(*parts(), ema_decay=0.3)
    expected = {name: value.clone() for name, value in state.weights().items() if value.is_floating_point()}
    assert state.average.parts.keys() == expected.keys()
    assert any("running_mean" in name for name in expected)
    # The decay is 1/10, 2/11, 3/12, 0.3 from then on.
    for step, decay in enumerate([1 / 10, 2 / 11, 3 / 12, 0.3, 0.3]):
        descend(state.model, state.optimizer, range(step, step + 1))
        state.average.update(step)
        now = state.weights()
        expected = {name: decay * value + (1 - decay) * now[name] for name, value in expected.items()}
        for name, value in expected.items():
            torch.testing.assert_close(state.average.parts[name], value)


def test_it_takes_the_place_of_the_weights_for_a_while() -> None:
    state = State(*parts(), ema_decay=0.5)
    descend(state.model, state.optimizer, range(2))
    state.average.update(1)
    before = {name: value.clone() for name, value in state.weights().items()}
    with state.average.in_place():
        inside = {name: value.clone() for name, value in state.weights().items()}
    assert all(torch.equal(value, before[name]) for name, value in state.weights().items())
    for name, value in state.average.parts.items():
        assert torch.equal(inside[name], value)
        assert not torch.equal(value, before[name])


def test_it_goes_on_from_a_checkpoint() -> None:
    state, other = (State(*parts(), ema_decay=0.9) for _ in range(2))
    descend(state.model, state.optimizer, range(3))
    state.average.update(1)
    other.load((name, value.clone()) for name, value in state.whole())
    for mine, theirs in zip(state.average.parts.values(), other.average.parts.values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_buffer_that_the_model_does_not_save_is_left_alone() -> None:
    """A mask of minus infinity would make the average NaN."""
    model, optimizer = parts()
    model.register_buffer("mask", torch.full((2,), -torch.inf), persistent=False)
    assert "mask" not in State(model, optimizer, ema_decay=0.9).average.parts


def test_without_a_decay_there_is_none() -> None:
    state = State(*parts())
    average = Average(dict(state.model.named_parameters()), None)
    average.update(1)
    with average.in_place():
        assert average.parts == {}
    assert not any(name.startswith("average.") for name, _ in state.whole())
