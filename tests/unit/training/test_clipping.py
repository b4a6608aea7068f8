"""Clipping by the norm of all gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipeline.ranks import Ranks
from pipeline.training.clipping import Clipping
from pipeline.training.state import State
from tests.unit.training.test_checkpoint import SingleNode, descend, parts


def with_gradients() -> State:
    state = State(*parts())
    descend(state.model, state.optimizer, range(1))
    return state


def gradients(state: State) -> list[torch.Tensor]:
    return [one.grad.clone() for one in state.model.parameters()]


@pytest.mark.parametrize("most", [0.01, 1e6])
def test_it_does_what_torch_does(most: float) -> None:
    state, other = with_gradients(), with_gradients()
    before = gradients(state)
    clipping = Clipping(state, SingleNode(), most)
    clipping()
    norm = torch.nn.utils.clip_grad_norm_(other.model.parameters(), most)
    assert clipping.figures() == {"train/gradient_norm": pytest.approx(norm.item(), rel=1e-6)}
    for mine, theirs, old in zip(gradients(state), gradients(other), before, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert torch.equal(mine, old) is (most > 1)


def test_without_a_limit_nothing_is_computed() -> None:
    state = with_gradients()
    before = gradients(state)
    clipping = Clipping(state, SingleNode(), None)
    clipping()
    assert clipping.figures() == {}
    assert all(torch.equal(one, other) for one, other in zip(gradients(state), before, strict=True))


def test_who_holds_which_rows_changes_no_bit(thread_ranks: Callable[..., list[Any]]) -> None:
    whole = with_gradients()
    alone = Clipping(whole, SingleNode(), 0.01)
    rows = [one.grad.clone() for one in whole.model.parameters()]
    alone()

    def work(group: Ranks) -> tuple[float, list[torch.Tensor]]:
        state = with_gradients()
        state.sharded = True
        shares = [torch.chunk(one, group.size) for one in rows]
        for parameter, share in zip(state.model.parameters(), shares, strict=True):
            own = share[group.rank] if group.rank < len(share) else parameter.detach()[:0]
            parameter.data, parameter.grad = own.clone(), own.clone()
        clipping = Clipping(state, group, 0.01)
        clipping()
        return clipping.figures()["train/gradient_norm"], gradients(state)

    for size in (2, 3):
        found = thread_ranks(size, work)
        assert {norm for norm, _ in found} == {alone.figures()["train/gradient_norm"]}
        for index, parameter in enumerate(whole.model.parameters()):
            assert torch.equal(torch.cat([own[index] for _, own in found]), parameter.grad)
