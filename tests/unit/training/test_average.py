"""The average of the weights."""

import torch

from pipeline.training.average import Average
from pipeline.training.state import State
from tests.unit.training.test_checkpoint import descend, parts


def test_it_is_torchs_exponential_moving_average() -> None:
    state = State(*parts(), ema_decay=0.9)
    reference = torch.optim.swa_utils.AveragedModel(state.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for step in range(4):
        descend(state.model, state.optimizer, range(step, step + 1))
        state.average.update()
        reference.update_parameters(state.model)
        if step == 0:
            # torch begins with the weights after the first step, we with those before it.
            for mine, theirs in zip(state.average.parts.values(), reference.module.parameters(), strict=True):
                theirs.data.copy_(mine)
    for mine, theirs in zip(state.average.parts.values(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach())


def test_it_takes_the_place_of_the_weights_for_a_while() -> None:
    state = State(*parts(), ema_decay=0.5)
    descend(state.model, state.optimizer, range(2))
    state.average.update()
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
    state.average.update()
    other.load({name: value.clone() for name, value in state.whole()})
    for mine, theirs in zip(state.average.parts.values(), other.average.parts.values(), strict=True):
        assert torch.equal(mine, theirs)


def test_without_a_decay_there_is_none() -> None:
    state = State(*parts())
    average = Average(dict(state.model.named_parameters()), None)
    average.update()
    with average.in_place():
        assert average.parts == {}
    assert not any(name.startswith("average.") for name, _ in state.whole())
