"""Divergence: no update touches a weight after a gradient that is not finite, and nothing that is not finite is kept."""

import json
import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import MachineError
from pipeline.parallel.lanes import Lanes, Task
from pipeline.ranks import Ranks
from pipeline.training import guard
from pipeline.training.guard import Diverged, NonFiniteGuard, check_kernels, finite, write_diagnosis
from pipeline.training.state import State
from tests.unit.training.test_checkpoint import SingleNode

CURE = "lower train.learning_rate or raise train.warmup_epochs"


@pytest.fixture(autouse=True, params=[False, True], ids=["on a CPU", "as on a GPU"])
def host_runs_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes a CPU can compute, too."""
    monkeypatch.setattr(guard, "runs_ahead", lambda _: request.param)


class Trained:
    """A model, its fused optimizer and their guard, which steps by gradients that are given."""

    def __init__(self, kind: str = "sgd"):
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.model[0].bias.requires_grad_(False)
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        build = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
        self.optimizer = build(parameters, lr=0.1, fused=True, **({"momentum": 0.9} if kind == "sgd" else {}))
        self.guard = NonFiniteGuard(State(self.model, self.optimizer), SingleNode(), lambda step: f"explained {step}")

    def step(self, value: float) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        self.model[0].weight.grad[1, 0] = value
        self.guard.observe()
        self.optimizer.step()

    def weights(self) -> list[float]:
        return self.model[0].weight.flatten().tolist()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_weight_is_updated_from_the_first_bad_gradient_on_and_its_step_is_named(kind: str, value: float) -> None:
    trained = Trained(kind)
    trained.guard.start(40)
    for _ in range(3):
        trained.step(1.0)
    trained.guard.raise_if_diverged()
    before = trained.weights()
    trained.step(value)
    trained.step(1.0)
    assert trained.weights() == before
    found = "the gradient of step 43 is not finite, and no weight was updated since"
    for ask in (trained.guard.raise_if_diverged, lambda: trained.guard.check(45)):
        with pytest.raises(Diverged, match=f"^training diverged: {found}; explained 43; {CURE}$"):
            ask()


def test_a_guard_that_starts_again_counts_from_there() -> None:
    trained = Trained()
    trained.step(1.0)
    trained.guard.start(7)
    trained.step(math.nan)
    with pytest.raises(Diverged, match="the gradient of step 7 "):
        trained.guard.raise_if_diverged()


def test_a_guard_that_was_not_told_counts_from_0() -> None:
    trained = Trained()
    trained.step(math.nan)
    with pytest.raises(Diverged, match="the gradient of step 0 "):
        trained.guard.raise_if_diverged()


def test_steps_are_counted_beyond_what_a_float_holds() -> None:
    trained = Trained()
    trained.guard._good_steps.fill_(2**24)
    trained.step(1.0)
    trained.step(math.nan)
    with pytest.raises(Diverged, match=f"the gradient of step {2**24 + 1} "):
        trained.guard.raise_if_diverged()


def test_weights_without_a_gradient_or_without_elements_are_passed_over() -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(size)) for name, size in (("frozen", 2), ("none", 0), ("trained", 2))})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = NonFiniteGuard(State(model, optimizer), SingleNode(), lambda step: "")
    for value in (1.0, math.nan):
        model["none"].grad, model["trained"].grad = torch.ones(0), torch.tensor([1.0, value])
        guard.observe()
        if value == 1.0:
            guard.check(1)
    with pytest.raises(Diverged, match="the gradient of step 1 "):
        guard.check(2)


def test_a_rank_that_has_no_part_of_any_weight_hears_of_it_from_the_others(thread_ranks: Callable[..., list[Any]]) -> None:
    def step(group: Ranks) -> str:
        model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(1 - group.rank))})
        state = State(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state.sharded = True
        guard = NonFiniteGuard(state, group, lambda step: "")
        guard.check(0)
        model["weight"].grad = torch.full((1 - group.rank,), math.nan)
        guard.observe()
        with pytest.raises(Diverged) as raised:
            guard.check(1)
        return str(raised.value)

    assert all("the gradient of step 0 is not finite" in one for one in thread_ranks(2, step))


def test_a_bad_gradient_in_one_ranks_part_ends_all_of_them_at_its_step(thread_ranks: Callable[..., list[Any]]) -> None:
    def step(group: Ranks) -> str:
        trained = Trained()
        state = State(trained.model, trained.optimizer)
        state.sharded = True
        trained.guard = NonFiniteGuard(state, group, lambda step: "")
        trained.step(1.0)
        trained.step(math.inf if group.rank == 1 else 1.0)
        trained.step(1.0)
        with pytest.raises(Diverged) as raised:
            trained.guard.raise_if_diverged()
        return str(raised.value)

    assert all("the gradient of step 1 is not finite" in one for one in thread_ranks(2, step))


def test_finite_gradients_change_weights_and_are_sound() -> None:
    trained = Trained()
    before = trained.weights()
    trained.step(1.0)
    assert trained.weights() != before
    trained.guard.check(1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_that_is_not_finite_is_kept(value: float) -> None:
    for name, damage in {
        "0.weight": lambda one: one.model[0].weight.data,
        "1.running_mean": lambda one: one.model[1].running_mean,
        "optimizer.1.weight.momentum_buffer": lambda one: one.optimizer.state_dict()["state"][1]["momentum_buffer"],
    }.items():
        trained = Trained()
        trained.step(1.0)
        damage(trained).view(-1)[0] = value
        with pytest.raises(Diverged, match=f"^training diverged: {name} holds NaN or infinity after step 9; {CURE}$"):
            trained.guard.check(9)


def test_the_first_of_several_is_named_and_who_asks_the_others_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, waited = Trained(), []
    monkeypatch.setattr(SingleNode.heartbeat, "waiting", lambda: waited.append(True))
    trained.guard.check(8)
    assert waited == [True]
    for parameter in trained.model.parameters():
        parameter.data.fill_(math.nan)
    with pytest.raises(Diverged, match=r"^training diverged: 0\.weight holds NaN"):
        trained.guard.check(9)


def test_a_weight_that_is_bad_on_one_rank_alone_ends_all_of_them(thread_ranks: Callable[..., list[Any]]) -> None:
    def check(group: Ranks) -> str:
        trained = Trained()
        guard = NonFiniteGuard(State(trained.model, trained.optimizer), group, lambda step: "")
        if group.rank == 1:
            trained.model[0].weight.data[0, 0] = math.nan
        with pytest.raises(Diverged) as raised:
            guard.check(3)
        return str(raised.value)

    said = thread_ranks(2, check)
    assert [one.split(" holds ")[0] for one in said] == ["training diverged: another rank", "training diverged: 0.weight"]


def test_figures_are_returned_if_they_are_finite() -> None:
    figures = {"train/loss": 0.5, "train/accuracy": 0.0}
    assert finite(figures, 3) is figures
    with pytest.raises(Diverged, match=f"^training diverged: train/loss is nan at step 3; {CURE}$"):
        finite({"train/accuracy": 0.5, "train/loss": math.nan}, 3)


def test_an_allocation_that_failed_is_an_error_also_if_nobody_reported_it() -> None:
    check_kernels({})
    check_kernels({"num_ooms": 0})
    with pytest.raises(
        MachineError, match=r"^the GPU's memory was too short for a kernel's workspace.*; free the GPU, or compute fewer images at once: "
    ):
        check_kernels({"num_ooms": 1})


def test_divergence_ends_with_5() -> None:
    assert Diverged.exit_code == 5


def told(group: Ranks, per_rank: list[int], bad: int | None, path: Path, asked: list[int] | None = None) -> str:
    def batch(step: int, lane: int) -> tuple[Tensor, Tensor]:
        (asked if asked is not None else []).append(group.rank)
        return torch.full((2, 3), math.inf if lane == bad else float(step)), torch.zeros(2, dtype=torch.long)

    task = Task(nn.Linear(3, 2, bias=False), batch, 1, 0.0, nullcontext)
    samples: Callable[[int, int], Tensor] = lambda step, lane: torch.tensor([step, 10 * lane])  # noqa: E731
    return write_diagnosis(path, task, Lanes(per_rank, group.rank, 2 * sum(per_rank)), group, samples, 4)


@pytest.mark.parametrize("per_rank", [[3], [1, 2]], ids=str)
def test_the_samples_of_a_bad_step_are_written_with_the_lanes_that_lost_their_loss(
    per_rank: list[int], tmp_path: Path, thread_ranks: Callable[..., list[Any]]
) -> None:
    path, asked = tmp_path / "diverged.json", list[int]()
    said = thread_ranks(len(per_rank), told, per_rank, 1, path, asked)
    # Ranks of a pipeline compute together.
    assert Counter(asked) == dict.fromkeys(range(len(per_rank)), max(per_rank))
    assert set(said) == {f"the loss of lanes [1] is non-finite, their samples: {path}"}
    # NaN and Infinity are no JSON.
    values = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (values["step"], values["lanes_without_a_loss"]) == (4, [1])
    assert [(one["lane"], one["samples"]) for one in values["lanes"]] == [(0, [4, 0]), (1, [4, 10]), (2, [4, 20])]
    assert [math.isfinite(float(one["loss"])) for one in values["lanes"]] == [True, False, True]
    assert path.read_text().endswith("}\n")


def test_what_cannot_be_written_does_not_hide_that_it_diverged(tmp_path: Path, thread_ranks: Callable[..., list[Any]]) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "diverged.json"
    assert thread_ranks(1, told, [2], 1, path) == ["the loss of lanes [1] is non-finite, their samples: not written (File exists)"]


def test_samples_are_written_also_if_every_loss_was_finite(tmp_path: Path, thread_ranks: Callable[..., list[Any]]) -> None:
    path = tmp_path / "diverged.json"
    assert thread_ranks(1, told, [2], None, path) == [f"its samples: {path}"]
    assert json.loads(path.read_text())["lanes_without_a_loss"] == []
