"""What DDP's users also set: parameters that take no part in a loss, and BatchNorm over all ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import parallel
from pipeline.config import ConfigError, Dist
from pipeline.parallel.lanes import Lanes, Task
from pipeline.training.checkpoint_file import weights_sha256
from pipeline.training.state import State
from tests.ranks.test_strategies import BATCH, NATIVE_TOLERANCE, batch_of, descend, floating, make_model

LANES, STEPS, WIDTH = 4, 3, 16 * 16
CPU = torch.device("cpu")


class Branches(nn.Module):
    """A layer for every image, one for lane 1 alone, one for step 1 alone, and one for none."""

    lanes: tuple[int, ...] = (1,)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.every, self.lane, self.step, self.never = (nn.Linear(WIDTH, 10) for _ in range(4))

    def forward(self, images: Tensor) -> Tensor:
        step, lane = images[0, 0, 0, :2].tolist()
        found = self.every(images.flatten(1))
        if lane in self.lanes:
            found = found + self.lane(images.flatten(1))
        return found + self.step(images.flatten(1)) if step == 1 else found


class Odd(Branches):
    """The second of two lanes a rank has a layer of its own, on every rank."""

    lanes = (1, 3)


class Early(nn.Module):
    """A layer for the first of two micro-batches alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.every, self.early = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        found = self.every(images.flatten(1))
        return found + self.early(images.flatten(1)) if int(images[0, 0, 0, 1]) % 2 == 0 else found


class Never(nn.Sequential):
    """Stages that a pipeline can cut, and a layer that takes no part."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(nn.Flatten(), nn.Linear(WIDTH, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 10))
        self[3].unused = nn.Linear(3, 3)


def marked(lanes: int, dtype: torch.dtype) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Batches whose first values say which step and lane they are of."""
    batch = batch_of(lanes, CPU, dtype)

    def read(step: int, lane: int) -> tuple[Tensor, Tensor]:
        images, labels = batch(step, lane)
        images[:, 0, 0, :2] = torch.tensor([step, lane], dtype=dtype)
        return images, labels

    return read


def by_hand(model: nn.Module, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Weights after some steps, a gradient of zeros for what takes no part."""
    model, batch = model.to(dtype), marked(LANES, dtype)
    for step in range(STEPS):
        model.zero_grad()
        for lane in range(LANES):
            images, labels = batch(step, lane)
            (F.cross_entropy(model(images), labels, reduction="sum") / BATCH).backward()
        for one in model.parameters():
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad
        descend(model.parameters())
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def with_strategy(group: Any, model: Any, strategy: str, reduction: str, dtype: torch.dtype, **changes: Any) -> Any:
    """Weights and their digest after the same steps on these ranks, or what is said against it."""
    model = model().to(dtype)
    task = Task(model, marked(LANES, dtype), 3, 0.0, nullcontext)
    shares = [len(one) for one in torch.arange(LANES).tensor_split(group.size)]
    settings = Dist.model_construct(strategy=strategy, reduction=reduction, **{"find_unused_parameters": True} | changes)
    built = parallel.build(task, Lanes(shares, group.rank, BATCH), group, settings)
    try:
        for step in range(STEPS):
            built.backward(step)
            descend([one for one in built.parameters.values() if one.numel()])
    except ConfigError as error:
        return str(error)
    state = State(model, torch.optim.SGD([*built.parameters.values()]), built, group)
    found = {name: value.clone() for name, value in state.weights().items()}
    return found, weights_sha256(found)


REPLICAS = ("ddp", "allreduce", "graphs")
CASES = {
    1: [(one, Branches, reduction) for one in ("ddp", "allreduce") for reduction in ("ordered", "native")]
    + [("dataparallel", Branches, "ordered"), ("dataparallel", Never, "ordered")],
    2: [(one, Branches, reduction) for one in REPLICAS for reduction in ("ordered", "native")]
    + [("tensor", Branches, "native"), ("tensor", Never, "native"), ("pipeline", Never, "ordered"), ("ddp", Never, "ordered")],
    3: [(one, Branches, "ordered") for one in REPLICAS] + [("pipeline", Never, "ordered")],
}


def test_what_takes_no_part_has_gradients_of_zeros_under_every_strategy(run_ranks) -> None:
    expected = {model: by_hand(model()) for model in (Branches, Never)}
    digests: dict[Any, set[str]] = {Branches: set(), Never: set()}
    for size, cases in CASES.items():
        exact = [(with_strategy, (model, strategy, reduction, torch.float64)) for strategy, model, reduction in cases]
        single = [(with_strategy, (model, one, "ordered", torch.float32)) for one, model, reduction in cases if reduction == "ordered"]
        for results in run_ranks(size, *exact, *single):
            for case, (found, _) in zip(cases, results[: len(cases)], strict=True):
                for name, value in expected[case[1]].items():
                    assert (found[name] - value).norm() < NATIVE_TOLERANCE * value.norm(), (size, case, name)
            for (_, (model, *_)), (_, digest) in zip(single, results[len(cases) :], strict=True):
                digests[model].add(digest)
    assert [len(some) for some in digests.values()] == [1, 1]


def test_without_the_setting_ddp_says_which_parameter_it_is(run_ranks) -> None:
    work = [(with_strategy, (Never, "ddp", reduction, torch.float32)) for reduction in ("ordered", "native")]
    off = {"find_unused_parameters": False}
    for size in (1, 2, 4):
        for results in run_ranks(size, *((without, (*arguments, off)) for _, arguments in work)):
            why = "model: 3.unused.weight took no part in the loss; set dist.find_unused_parameters: true, or remove it"
            assert results == [why, why]
    for (why,) in run_ranks(2, (without, (Odd, "fsdp", "ordered", torch.float32, off))):
        assert why == "model: lane took no part in a lane's loss; set dist.strategy: ddp and find_unused_parameters: true, or remove it"
    for results in run_ranks(4, *((without, (Never, "fsdp", reduction, torch.float32, off)) for reduction in ("ordered", "native"))):
        why = "model: 3.unused.weight took no part in a lane's loss; set dist.strategy: ddp and find_unused_parameters: true, or remove it"
        assert results == [why, why]


def without(group: Any, *arguments: Any) -> Any:
    *rest, changes = arguments
    return with_strategy(group, *rest, **changes)


def as_two_ranks_have_them(step: int, lane: int) -> tuple[Tensor, Tensor]:
    """The images of a micro-batch of both ranks, where each has two."""
    mine, other = (batch_of(4, CPU, torch.float64)(step, lane + before) for before in (0, 2))
    return torch.cat([mine[0], other[0]]), torch.cat([mine[1], other[1]])


def curve(group: Any, strategy: str, accumulation: int, sync: bool, read: Any = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some steps, weights and statistics under native."""
    # One whose average is of all steps, one without weights, and one as usual.
    first, last = nn.BatchNorm2d(1, momentum=None), nn.BatchNorm1d(10, affine=False)
    model = nn.Sequential(first, make_model("lenet", CPU), last, nn.Sigmoid(), nn.BatchNorm1d(10)).double()
    lanes = Lanes([accumulation] * group.size, group.rank, BATCH)
    task = Task(model, read or batch_of(lanes.count, CPU, torch.float64), 3, 0.1, nullcontext)
    settings = Dist.model_construct(strategy=strategy, reduction="native", sync_batchnorm=sync)
    built = parallel.build(task, lanes, group, settings)
    losses: list[float] = []
    for step in range(STEPS):
        losses.append(built.backward(step).over_ranks()["train/loss"])
        descend(built.parameters.values())
    state = State(model, torch.optim.SGD([*built.parameters.values()]), built, group)
    return losses, {key: value.clone() for key, value in (state.weights() | floating(model)).items() if value.is_floating_point()}


@pytest.mark.parametrize(("strategy", "sizes"), [("ddp", (2, 3, 4)), ("allreduce", (2,)), ("fsdp", (2,))])
def test_statistics_are_those_of_one_process_with_the_whole_batch(strategy: str, sizes: tuple[int, ...], run_ranks) -> None:
    (((losses, expected),),) = run_ranks(1, (curve, ("ddp", 1, True)))
    for size in sizes:
        synced, alone = ((curve, (strategy, 1, sync)) for sync in (True, False))
        for (found_losses, found), (other, _) in run_ranks(size, synced, alone):
            assert found_losses == pytest.approx(losses, rel=NATIVE_TOLERANCE)
            assert other != pytest.approx(losses, rel=1e-6)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert (found[key] - value).norm() <= NATIVE_TOLERANCE * value.norm(), (size, key)


def test_with_accumulation_each_micro_batch_has_the_statistics_of_all_ranks(run_ranks) -> None:
    (((losses, expected),),) = run_ranks(1, (curve, ("ddp", 2, True, as_two_ranks_have_them)))
    for (found_losses, found), (other, _) in run_ranks(2, (curve, ("ddp", 2, True)), (curve, ("ddp", 2, False))):
        assert found_losses == pytest.approx(losses, rel=NATIVE_TOLERANCE)
        assert other != pytest.approx(losses, rel=1e-6)
        for key, value in expected.items():
            assert (found[key] - value).norm() <= NATIVE_TOLERANCE * value.norm(), key


def test_what_only_an_earlier_micro_batch_uses_is_named_in_its_step(run_ranks) -> None:
    found = run_ranks(2, (with_strategy, (Early, "ddp", "native", torch.float64)))
    assert found[0][0][1] == found[1][0][1]
    named = run_ranks(2, (partial(with_strategy, find_unused_parameters=False), (Early, "ddp", "native", torch.float64)))
    assert [one for (one,) in named] == [
        "model: early.weight took no part in the loss; set dist.find_unused_parameters: true, or remove it"
    ] * 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm: under reduction: ordered a lane has statistics of its own; set reduction: native"),
        ({"sync_batchnorm": True, "strategy": "tensor", "reduction": "native"}, "sync_batchnorm: tensor does not bring"),
        ({"find_unused_parameters": True, "strategy": "fsdp"}, "find_unused_parameters: fsdp waits for the gradients of a whole block"),
    ],
)
def test_what_does_not_suit_a_strategy_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"dist\.{why}"):
        parallel.check(Dist.model_construct(**changes))


def after(group: Any, starts: tuple[int, ...]) -> str:
    """The digest of all that is trained after four steps, where DDP began anew before each of these."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 40), nn.Linear(40, 10))
    torch.manual_seed(7)
    for one in model.parameters():
        nn.init.normal_(one, std=0.1)
    built: Any = None
    for step in range(4):
        if step in starts:
            task = Task(model, batch_of(3, CPU), 3, 0.0, nullcontext)
            built = parallel.build(
                task, Lanes([1, 1, 1], group.rank, BATCH), group, Dist.model_construct(strategy="ddp", reduction="native")
            )
        built.backward(step)
        descend(model.parameters())
    return weights_sha256(model.state_dict())


def test_native_ends_in_the_same_bits_after_a_resume(run_ranks) -> None:
    found = {digest for ranks in run_ranks(3, (after, ((0,),)), (after, ((0, 2),)), (after, ((0, 1, 3),))) for digest in ranks}
    assert len(found) == 1
