"""What is differentiated in a lane, and the totals of a step."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import draw_seed
from pipeline.parallel import lanes
from pipeline.parallel.lanes import Lanes, Replicated, Task, Totals, draws, fold, right_answers, scaled, seed_draws, set_draws
from pipeline.ranks import Ranks


def batch(step: int, lane: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(10 * step + lane)
    return torch.randn(5, 3, generator=source), torch.randint(7, (5,), generator=source)


def made(label_smoothing: float = 0.0, autocast: Callable[[], Any] = nullcontext, dropout: float = 0.0) -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Dropout(dropout), nn.Linear(3, 7)), batch, 3, label_smoothing, autocast)


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Of each sample, by the definition."""
    return logits.exp().sum(1).log() - logits[torch.arange(len(labels)), labels]


def by_sorting(logits: Tensor, labels: Tensor) -> list[int]:
    """How many labels are the first of the sorted classes, and how many among the first five."""
    places = [
        sorted(range(len(row)), key=lambda one: -row[one]).index(label) for row, label in zip(logits.tolist(), labels.tolist(), strict=True)
    ]
    return [sum(place < count for place in places) for count in (1, 5)]


def test_a_lane_gives_the_sum_of_its_losses_and_its_row_of_loss_and_right_answers() -> None:
    task = made()
    loss, compute_row = task.forward(task.model, 2, 1)
    row = compute_row()
    images, labels = batch(2, 1)
    logits = task.model(images)
    assert loss.item() == pytest.approx(losses(logits, labels).sum().item(), rel=1e-6)
    assert loss.requires_grad
    assert row.tolist() == [loss.item(), *by_sorting(logits, labels)]
    assert (row.dtype, row.requires_grad) == (torch.float64, False)


def test_a_row_is_computed_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(lanes, "right_answers", lambda logits, labels: (seen.append(labels), right_answers(logits, labels))[1])
    task = made()
    _, compute_row = task.forward(task.model, 2, 1)
    assert seen == []
    compute_row()
    assert len(seen) == 1


def test_right_answers_are_those_with_the_largest_output() -> None:
    task = made()
    _, labels = batch(0, 0)
    right = Task(lambda _: nn.functional.one_hot(labels, 7).float(), batch, 3, 0.0, nullcontext)
    assert right.forward(right.model, 0, 0)[1]()[1:].tolist() == [5, 5]
    wrong = Task(lambda _: -nn.functional.one_hot(labels, 7).float(), batch, 3, 0.0, nullcontext)
    assert wrong.forward(wrong.model, 0, 0)[1]()[1:].tolist() == [0, 0]
    assert task.forward(task.model, 0, 0)[1]()[0].item() > 0


@pytest.mark.parametrize("classes", [1, 2, 4, 5, 6, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_outputs_the_first_is_larger_and_of_fewer_than_five_classes_all_are_among_the_first_five(
    classes: int, dtype: torch.dtype
) -> None:
    source = torch.Generator().manual_seed(classes)
    labels = torch.randint(classes, (300,), generator=source)
    logits = torch.randn(300, classes, generator=source).to(dtype)
    for one in (logits, logits.round().clamp(-1, 1), torch.zeros_like(logits)):
        found = [count.item() for count in right_answers(one, labels)]
        assert found == by_sorting(one, labels)
        assert found[0] == (one.argmax(1) == labels).sum()
        assert classes > 5 or found[1] == 300


def test_an_output_that_is_no_number_is_not_larger_than_others() -> None:
    logits = torch.full((3, 7), math.nan)
    logits[2] = torch.arange(7.0)
    assert [count.item() for count in right_answers(logits, torch.tensor([0, 6, 2]))] == [0, 1]


@pytest.mark.parametrize(("given", "computed"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2])
def test_the_loss_is_computed_in_fp32_at_least(given: torch.dtype, computed: torch.dtype) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(given)
    task = Task(lambda _: logits, batch, 3, 0.0, nullcontext)
    loss, _ = task.forward(task.model, 0, 0)
    assert loss.dtype == computed


def test_a_loss_is_scaled_exactly_and_one_that_is_no_number_makes_the_gradients_none() -> None:
    for value, share, expected in ((3.0, 0.25, 0.25), (3.0, 1 / 3, 1 / 3), (math.inf, 0.25, math.nan), (math.nan, 0.25, math.nan)):
        loss = torch.tensor(value, requires_grad=True)
        part = scaled(loss, share)
        assert part.item() == pytest.approx(value * share, rel=1e-7, nan_ok=True) or not math.isfinite(value)
        part.backward()
        assert loss.grad is not None
        assert loss.grad.item() == pytest.approx(torch.tensor(expected).item(), rel=0, abs=0, nan_ok=True)


def test_random_draws_go_on_from_where_they_stood() -> None:
    here = torch.device("cpu")
    seed_draws(5, here)
    state = draws(here)
    first = torch.rand(4)
    set_draws(state, here)
    assert torch.equal(torch.rand(4), first)
    assert not torch.equal(torch.rand(4), first)


def test_a_class_counts_in_the_loss_as_much_as_it_weighs() -> None:
    logits, labels = torch.randn(9, 7), torch.arange(9) % 7
    weights = torch.linspace(0.2, 2, 7)
    plain, weighed = made(), replace(made(), class_weights=weights)
    alone = [plain.loss(lambda one: one, logits[one : one + 1], labels[one : one + 1])[0] for one in range(9)]
    loss, compute_row = weighed.loss(lambda one: one, logits, labels)
    row = compute_row()
    assert torch.allclose(loss, sum(one * weights[label] for one, label in zip(alone, labels, strict=True)))
    assert torch.equal(row[1:], plain.loss(lambda one: one, logits, labels)[1]()[1:])


def test_label_smoothing_takes_a_share_of_the_loss_over_all_classes() -> None:
    sharp, smooth = made(), made(label_smoothing=0.25)
    images, labels = batch(2, 1)
    logits = sharp.model(images)
    over_all = sum(losses(logits, torch.full_like(labels, one)).sum().item() for one in range(7)) / 7
    expected = 0.75 * sharp.forward(sharp.model, 2, 1)[0].item() + 0.25 * over_all
    assert smooth.forward(smooth.model, 2, 1)[0].item() == pytest.approx(expected, rel=1e-6)


def test_the_model_computes_under_autocast_and_the_loss_in_full_precision() -> None:
    task, half = made(), made(autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    loss, half_loss = (one.forward(one.model, 2, 1)[0] for one in (task, half))
    assert half_loss.dtype == torch.float32
    images, labels = batch(2, 1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = half.model(images)
    assert logits.dtype == torch.bfloat16
    assert half_loss.item() == pytest.approx(losses(logits.float(), labels).sum().item(), rel=1e-6)
    assert half_loss.item() != loss.item()


def test_the_draws_of_a_lane_depend_on_seed_step_and_lane_alone() -> None:
    task = made(dropout=0.5)
    first, _ = task.forward(task.model, 2, 1)
    torch.rand(3)
    assert torch.equal(task.forward(task.model, 2, 1)[0], first)
    torch.manual_seed(draw_seed(3, "lane", 2, 1))
    images, labels = batch(2, 1)
    assert first.item() == pytest.approx(losses(task.model(images), labels).sum().item(), rel=1e-6)


def test_a_gpus_draws_leave_those_of_the_cpu_alone() -> None:
    seed_draws(5, torch.device("cpu"))
    assert torch.default_generator.initial_seed() == 5
    seed_draws(6, torch.device("cuda"))
    assert torch.default_generator.initial_seed() == 5


def totals(group: Ranks, per_rank: list[int]) -> dict[str, float]:
    lanes = Lanes(per_rank, group.rank, 48)
    rows = [torch.tensor([0.1 * 10.0**lane, lane, lane + 1], dtype=torch.float64) for lane in lanes.own]
    return Totals([partial(torch.clone, row) for row in rows], lanes, group).over_ranks()


@pytest.mark.parametrize("per_rank", [[6], [3, 3], [1, 2, 3], [6, 0]], ids=str)
def test_totals_are_means_over_the_global_batch_and_the_same_on_any_ranks(
    per_rank: list[int], thread_ranks: Callable[..., list[Any]]
) -> None:
    (alone,) = thread_ranks(1, totals, [6])
    assert all(type(value) is float for value in alone.values())
    assert (alone["train/accuracy"], alone["train/top5_accuracy"]) == (15 / 48, 21 / 48)
    assert math.isclose(alone["train/loss"], 11111.1 / 48)
    assert all(found == alone for found in thread_ranks(len(per_rank), totals, per_rank))


def test_every_rank_knows_how_many_lanes_there_are() -> None:
    assert [Lanes([1, 2, 3], rank, 48).count for rank in range(3)] == [6, 6, 6]


def test_the_last_blocks_are_added_first() -> None:
    assert fold([(0, 4, "a"), (4, 2, "b"), (6, 1, "c")], lambda left, right: f"({left}+{right})") == "(a+(b+c))"


@pytest.mark.parametrize(
    ("whole", "name"),
    [(Lanes([1], 0, 4), "rank"), (made(), "seed"), (Totals([], Lanes([1], 0, 4), None), "rows")],
    ids=lambda one: type(one).__name__,
)
def test_what_a_strategy_is_given_cannot_be_changed(whole: object, name: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(whole, name, 1)


def test_a_strategy_that_holds_the_whole_model_shares_nothing_out() -> None:
    model = nn.Linear(2, 3)
    whole = Replicated(model)
    assert not whole.sharded
    assert whole.parameters == dict(model.named_parameters())
    assert whole.part("weight", model.weight) is model.weight
    assert whole.shapes == {"weight": model.weight.shape, "bias": model.bias.shape}
