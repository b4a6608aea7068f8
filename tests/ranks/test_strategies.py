"""Every strategy in the catalogue against one process that computes the same lanes."""

import functools
import itertools
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline import models, parallel
from pipeline.config import Dist, draw_seed
from pipeline.hardware.environment import FIXED
from pipeline.models.cpu_layers import replace_kernels
from pipeline.parallel.lanes import Lanes, Task
from pipeline.training.checkpoint_file import weights_sha256
from pipeline.training.state import State
from tests.kit.devices import also_on_gpu

BATCH, STEPS = 24, 2
# How far native may be from one process in float64, as a share of the tensor's norm.
NATIVE_TOLERANCE = 1e-10


def make_model(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    model = models.build(name, 1, 16, 10)
    if device.type == "cpu":
        replace_kernels(model)  # as ranks do: torch's own gradients in bf16 differ now and then on small maps
    return model.to(device=device, dtype=dtype, memory_format=torch.channels_last)


def batch_of(lanes: int, device: torch.device, dtype: torch.dtype = torch.float32):
    def batch(step: int, lane: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(step)
        images, labels = torch.randn(BATCH, 1, 16, 16, generator=source).to(dtype), torch.randint(10, (BATCH,), generator=source)
        size = BATCH // lanes
        own = slice(lane * size, (lane + 1) * size)
        return images[own].to(device).contiguous(memory_format=torch.channels_last), labels[own].to(device)

    return batch


def autocast(bf16: bool, device: torch.device):
    return (lambda: torch.autocast(device.type, torch.bfloat16)) if bf16 else nullcontext


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {f"{name}.grad": parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: value.cpu() for name, value in (gradients | floating(model)).items()}


def floating(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def with_strategy(
    group, strategy: str, reduction: str, model_name: str, per_rank: list[int], bf16: bool, steps=STEPS, dtype=torch.float32, **more: int
) -> tuple[str, Any, Any]:
    """Gradients and buffers after some steps on these ranks, with plain descent in between."""
    torch.use_deterministic_algorithms(True)
    model = make_model(model_name, group.device, dtype)
    lanes = Lanes(per_rank, group.rank, BATCH)
    task = Task(model, batch_of(lanes.count, group.device, dtype), 3, 0.1, autocast(bf16, group.device))
    name, _, rest = strategy.partition(" ")
    algorithm, replicas = (None, 2) if rest == "x 2" and len(per_rank) % 2 == 0 else (rest or None, 1)
    settings = Dist.model_construct(strategy=name, reduction=reduction, algorithm=algorithm, replicas=replicas, **more)
    built = parallel.build(task, lanes, group, settings)
    totals = []
    for step in range(steps):
        totals.append(built.backward(step).over_ranks())
        descend(built.parameters.values())
    state = State(model, torch.optim.SGD([*built.parameters.values()]), built, group)
    gradients = {f"{name}.grad": state.whole_of(name, one.grad) for name, one in built.parameters.items() if one.grad is not None}
    # Without the storage that a gradient may be a view of.
    found = {name: value.cpu().clone() for name, value in (gradients | floating(model)).items()}
    return weights_sha256(found), found, totals


Add = Callable[[list[torch.Tensor]], torch.Tensor]


def in_a_tree(values: list[torch.Tensor]) -> torch.Tensor:
    """The order that is promised: for four lanes (0 + 1) + (2 + 3)."""
    if len(values) == 1:
        return values[0]
    first = 1 << ((len(values) - 1).bit_length() - 1)
    return in_a_tree(values[:first]) + in_a_tree(values[first:])


def from_left(values: list[torch.Tensor]) -> torch.Tensor:
    """Another order."""
    return functools.reduce(torch.add, values)


def one_process(
    model_name: str,
    count: int,
    bf16: bool,
    steps: int = STEPS,
    *,
    add: Add = in_a_tree,
    seed: int = 3,
    training: bool = True,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[str, Any, Any]:
    """The same lanes by hand."""
    os.environ |= FIXED
    torch.use_deterministic_algorithms(True)
    place = torch.device(device)
    model = make_model(model_name, place, dtype).train(training)
    totals = []
    for step in range(steps):
        results, losses, right = lanes_by_hand(model, step, count, bf16, seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.grad = add([result[f"{name}.grad"] for result in results]).to(place)
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point():
                    buffer.copy_(add([result[name] for result in results]) / count)
        shares = {"train/accuracy": right[0] / BATCH, "train/top5_accuracy": right[1] / BATCH}
        totals.append({"train/loss": torch.stack(losses).sum().item() / BATCH} | shares)
        descend(model.parameters())
    found = tensors(model)
    return weights_sha256(found), found, totals


def lanes_by_hand(model: nn.Module, step: int, count: int, bf16: bool, seed: int) -> tuple[list[Any], list[torch.Tensor], list[int]]:
    """Gradients and buffers after each lane of a step, the lanes' losses, and how many answers are right and among the first five."""
    some = next(model.parameters())
    place, precision = some.device, torch.promote_types(some.dtype, torch.float32)
    start, batch = [buffer.clone() for buffer in model.buffers()], batch_of(count, place, some.dtype)
    results, losses, right = [], [], [0, 0]
    for lane in range(count):
        for buffer, value in zip(model.buffers(), start, strict=True):
            buffer.copy_(value)
        model.zero_grad()
        torch.manual_seed(draw_seed(seed, "lane", step, lane))
        images, labels = batch(step, lane)
        with autocast(bf16, place)():
            logits = model(images)
        loss = F.cross_entropy(logits.to(precision), labels, reduction="sum", label_smoothing=0.1)
        (loss / BATCH).backward()
        losses.append(loss.detach().double())
        places = logits.sort(dim=1, descending=True, stable=True).indices == labels[:, None]
        right = [so_far + int(places[:, :first].sum()) for so_far, first in zip(right, (1, 5), strict=True)]
        results.append(tensors(model))
    return results, losses, right


def descend(parameters: Iterable[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 0.05 * parameter.grad


# With another algorithm, or with two copies of the model.
STRATEGIES = [*parallel.CATALOGUE, "allreduce naive", "pipeline gpipe", "pipeline x 2", "fsdp x 2", "ddp butterfly"]
CASES = [("mlp", False), ("lenet", True), ("resnet18", False)]
SHARES = {1: [[4]], 2: [[2, 2], [3, 1], [1, 3]], 3: [[1, 1, 2], [2, 1, 1]], 4: [[1, 1, 1, 1]]}


def judged(strategy: str, case: tuple[str, bool], share: list[int]) -> bool:
    """Return whether a strategy is to show its bits here: where it can, and a step of ResNet-18 takes a second."""
    equal, resnet = len(set(share)) == 1, case[0] == "resnet18"
    if strategy == "tensor":
        return False
    if strategy == "pipeline gpipe":
        return len(share) in (2, 3) and not resnet
    if strategy in ("allreduce naive", "graphs") and resnet:
        return share in ([4], [2, 2])
    if "x 2" in strategy or strategy in ("dataparallel", "ddp butterfly"):
        return len(share) == (1 if strategy == "dataparallel" else 4)
    return (strategy != "fsdp" or equal) and (strategy == "ddp" or not resnet or share == SHARES[len(share)][0])


@also_on_gpu("G1, G16: every strategy has the bits of one process, whoever owns the lanes")
def test_ordered_equals_one_process_bit_for_bit_on_any_ranks(device: str, run_ranks) -> None:
    expected = {case: one_process(case[0], 4, case[1], device=device) for case in CASES}
    checked = dict.fromkeys(STRATEGIES, 0)
    for size, shares in SHARES.items():
        keys = [key for key in itertools.product(STRATEGIES, CASES, shares) if judged(*key)]
        work = [(with_strategy, (strategy, "ordered", name, share, bf16)) for strategy, (name, bf16), share in keys]
        for results in run_ranks(size, *work, device=device):
            for (strategy, case, share), (sha256, _, totals) in zip(keys, results, strict=True):
                assert sha256 == expected[case][0], (strategy, case, share)
                assert totals == expected[case][2], (strategy, case, share)
                checked[strategy] += 1
    few = {"tensor": 0, "dataparallel": 3, "fsdp": 3 * 7, "pipeline gpipe": 2 * 12}
    few |= dict.fromkeys(("fsdp x 2", "pipeline x 2", "ddp butterfly"), 3 * 4)
    few |= dict.fromkeys(("allreduce naive", "graphs"), 2 * 17 + 3)
    assert checked == dict.fromkeys(STRATEGIES, 17 + 17 + 10) | {"ddp": 3 * 17} | few


@pytest.mark.parametrize("share", [[2, 2, 2], [3, 3], [4, 4], [5, 5]], ids=str)
def test_fsdp_has_the_bits_of_one_process_with_any_number_of_lanes_a_rank(share: list[int], run_ranks) -> None:
    """And on three ranks, which cannot share a parameter's rows out evenly, and of which one may have none."""
    work = [(with_strategy, ("fsdp", "ordered", name, share, bf16)) for name, bf16 in CASES[:2]]
    for (name, bf16), (sha256, _, totals) in zip(CASES[:2], run_ranks(len(share), *work)[0], strict=True):
        expected, _, expected_totals = one_process(name, sum(share), bf16)
        assert (sha256, totals) == (expected, expected_totals), name


def test_native_equals_one_process_within_rounding(run_ranks) -> None:
    """A step of ResNet-18, and loss curves of an MLP, one of 50 steps; under [2, 2] every rank accumulates two micro-batches.

    In float64, so that a wrong term cannot hide in the rounding of other orders of additions.
    """
    references = {key: one_process(key[0], 4, False, key[1], dtype=torch.float64) for key in (("mlp", 50), ("mlp", 5), ("resnet18", 1))}
    # Of those that take both reductions, and do not add up in the tree under each.
    strategies = [one for one in STRATEGIES if one not in ("dataparallel", "pipeline gpipe", "pipeline x 2")]
    for size, share in ((1, [4]), (2, [2, 2]), (4, [1, 1, 1, 1])):
        keys = [(strategy, ("mlp", 50 if size == 2 else 5)) for strategy in strategies]
        # Of which a step takes a second.
        keys += [(strategy, ("resnet18", 1)) for strategy in {1: [], 2: strategies, 4: ["ddp", "fsdp x 2"]}[size]]
        work = [(with_strategy, (strategy, "native", name, share, False, steps, torch.float64)) for strategy, (name, steps) in keys]
        for (strategy, case), (_, found, totals) in zip(keys, run_ranks(size, *work)[0], strict=True):
            _, expected, expected_totals = references[case]
            for key, value in expected.items():
                error = ((found[key] - value).norm() / value.norm()).item()
                assert error < NATIVE_TOLERANCE, (strategy, size, case, key, error)
            losses, expected_losses = ([one["train/loss"] for one in curve] for curve in (totals, expected_totals))
            assert len(losses) == case[1] and losses == pytest.approx(expected_losses, rel=NATIVE_TOLERANCE), (strategy, size, case)


def test_the_reference_depends_on_what_it_should() -> None:
    """Fails if the digests above could not tell two computations apart."""
    found = {
        "as above": one_process("mlp", 4, False),
        "in bf16": one_process("mlp", 4, True),
        "two lanes": one_process("mlp", 2, False),
        "eight lanes": one_process("mlp", 8, False),
        "another order of additions": one_process("mlp", 4, False, add=from_left),
        "other draws for dropout": one_process("mlp", 4, False, seed=4),
        "no dropout": one_process("mlp", 4, False, training=False),
    }
    assert len({digest for digest, _, _ in found.values()}) == len(found)
    assert one_process("resnet18", 4, False, 1)[0] != one_process("resnet18", 4, False, 1, add=from_left)[0]
