"""A training's state by name."""

import pytest
import torch

from pipeline.training.state import State
from tests.unit.training.test_checkpoint import descend, parts


def test_names_are_those_of_parameters_and_buffers() -> None:
    state = State(*parts())
    descend(state.model, state.optimizer, range(1))
    names = [name for name, _ in state.whole()]
    assert names[:3] == ["model.0.weight", "model.0.bias", "model.1.weight"]
    assert "model.1.running_mean" in names
    assert names[-1] == "optimizer.3.bias.momentum_buffer"
    assert list(state.weights()) == list(state.model.state_dict())


def test_a_state_that_is_taken_is_equal_and_shares_no_memory() -> None:
    state, other = State(*parts()), State(*parts())
    descend(state.model, state.optimizer, range(3))
    tensors = {name: value.clone() for name, value in state.whole()}
    other.load(tensors.items())
    assert all(torch.equal(value, tensors[name]) for name, value in other.whole())
    descend(other.model, other.optimizer, range(3, 4))
    assert all(torch.equal(value, tensors[name]) for name, value in state.whole())


def test_a_state_of_another_model_is_refused() -> None:
    state = State(*parts())
    tensors = dict(state.whole())
    del tensors["model.3.bias"]
    with pytest.raises(RuntimeError, match=r"of another model: 3\.bias is not in both"):
        state.load(tensors.items())
    with pytest.raises(RuntimeError, match=r"of another model: 3\.bias has the shape \[1\] there"):
        state.load((tensors | {"model.3.bias": torch.zeros(1)}).items())
