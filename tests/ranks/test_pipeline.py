"""The schedules of a pipeline: when a stage turns back, and how many lanes' activations it keeps until then."""

from typing import Any

import pytest

from pipeline.parallel.pipeline import Pipeline
from tests.ranks.test_strategies import CASES, one_process, with_strategy


def turns(group: Any, strategy: str, per_rank: list[int]) -> list[str]:
    """What a stage does in a step: `f` is a lane's forward, `b` a backward."""
    patch, seen = pytest.MonkeyPatch(), list[str]()
    forward, backward = Pipeline._pass, Pipeline._differentiate

    def forwarding(self: Any, *rest: Any) -> Any:
        seen.append("f")
        return forward(self, *rest)

    def backwarding(self: Any, *rest: Any) -> Any:
        seen.append("b")
        return backward(self, *rest)

    with patch.context() as patched:
        patched.setattr(Pipeline, "_pass", forwarding)
        patched.setattr(Pipeline, "_differentiate", backwarding)
        with_strategy(group, strategy, "ordered", "mlp", per_rank, False, 1)
    return seen


def test_a_stage_turns_back_as_soon_as_a_gradient_can_be_there(run_ranks) -> None:
    """So that it keeps the activations of three lanes, of two, and of one; under GPipe of all six."""
    work = [(turns, (strategy, [2, 2, 2])) for strategy in ("pipeline", "pipeline gpipe")]
    found = [["".join(seen) for seen in stage] for stage in run_ranks(3, *work)]
    at_once = ["fff" + 3 * "bf" + "bbb", "ff" + 4 * "bf" + "bb", "f" + 5 * "bf" + "b"]
    assert found == [[line, 6 * "f" + 6 * "b"] for line in at_once]


def test_copies_may_take_unequal_numbers_of_lanes(run_ranks) -> None:
    """Four lanes on the first two ranks, and two on the others."""
    for name, bf16 in CASES[:2]:
        expected, _, totals = one_process(name, 6, bf16)
        for ((found, _, found_totals),) in run_ranks(4, (with_strategy, ("pipeline x 2", "ordered", name, [2, 2, 1, 1], bf16))):
            assert (found, found_totals) == (expected, totals), name
