"""FSDP and pipeline: every rank holds a part of the weights, and the bits are those of DDP."""

import gc
import itertools
import math
from collections import Counter
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from pipeline import models
from pipeline.job import Job
from pipeline.parallel import fsdp, pipeline, tensor
from pipeline.tracking.journal import Silent
from pipeline.training import train_rank
from pipeline.training.guard import Diverged
from tests.kit.experiment import make_job
from tests.ranks.test_bits import Placement, job_of, steps_of, trained
from tests.ranks.test_divergence import SHAPE, STEP, diverged

pytestmark = pytest.mark.slow
LENET, ADAMW, RESNET = "lenet, crop-flip, bf16", "mlp with dropout, adamw, bf16", "resnet18, crop-flip, fp32"


# The norm is below that of most gradients.
MORE = {"clip_norm": 0.5, "ema_decay": 0.9}


def job(folder: Path, case: str, strategy: str, size: int, run: str, replicas: int = 1) -> Job:
    found = job_of(folder, case, Placement(size), run)
    config = found.config
    changed = {
        "dist": config.dist.model_copy(update={"strategy": strategy, "replicas": replicas}),
        "train": config.train.model_copy(update=MORE),
    }
    return found.model_copy(update={"config": config.model_copy(update=changed)})


def files(job: Job) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in job.checkpoints.glob("*.safetensors")}


def test_a_sharded_training_has_the_bits_and_the_checkpoints_of_ddp(tmp_path: Path, run_ranks) -> None:
    cases = (LENET, ADAMW, RESNET)
    alone = {case: job(tmp_path, case, "ddp", 1, "ddp") for case in cases}
    (expected,) = run_ranks(1, *((trained, (alone[case], None)) for case in cases))
    placed = itertools.product(("fsdp", "pipeline"), ((2, 1, cases), (4, 1, cases[:2]), (4, 2, cases[:2])))
    for strategy, (size, replicas, shared) in placed:
        jobs = [job(tmp_path, case, strategy, size, f"{strategy}-{size}-{replicas}", replicas) for case in shared]
        for results in run_ranks(size, *((trained, (one, None)) for one in jobs)):
            assert results == expected[: len(shared)]
        for case, one in zip(shared, jobs, strict=True):
            # Momenta and best models too: the files are equal byte for byte.
            assert files(one) == files(alone[case]), (case, strategy, size, replicas)
            assert len(files(one)) == 3


def test_what_one_strategy_saves_any_other_goes_on_from(tmp_path: Path, run_ranks) -> None:
    chain = [("ddp", 2), ("fsdp", 4), ("allreduce", 3), ("pipeline", 3), ("fsdp", 2), ("dataparallel", 1), ("pipeline", 2), ("graphs", 2)]
    # LeNet with momentum: tests/faults/test_strategy_faults.py.
    ((expected, _),) = run_ranks(1, (trained, (job(tmp_path, ADAMW, "ddp", 1, "alone"), None)))[0]
    digest = ""
    for stop, (strategy, size) in enumerate(chain, 1):
        last = stop == len(chain)
        one = job(tmp_path, ADAMW, strategy, size, "passed on")
        ((digest, step),) = run_ranks(size, (trained, (one, None if last else 2 * stop)))[0]
        # The question put after the signal is answered one step later, unless it came in time for the one before.
        assert step in ([steps_of(ADAMW)] if last else [2 * stop, 2 * stop + 1]), (strategy, size)
    assert digest == expected


def held(group: Any, job: Job) -> tuple[int, int, int]:
    """How many numbers of parameters and optimizer this rank holds, how many there are, and the bytes of all that it keeps in floats."""
    train_rank.fix_bits(1)
    before = kept_bytes()
    state, _, _ = train_rank.train(job, group, Silent())
    kept = kept_bytes() - before
    parts = [part for _, parameter, part in state.parts() if parameter is not None]
    return sum(part.numel() for part in parts), sum(value.numel() for name, value in state.whole() if "running" not in name), kept


def kept_bytes() -> int:
    gc.collect()
    storages = [one.untyped_storage() for one in gc.get_objects() if type(one) in (Tensor, Parameter) and one.dtype == torch.float32]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def test_four_ranks_hold_a_quarter_each_of_parameters_and_optimizer(tmp_path: Path, run_ranks) -> None:
    sharded, whole = (run_ranks(4, (held, (job(tmp_path, LENET, strategy, 4, strategy),))) for strategy in ("fsdp", "ddp"))
    for ((own, everything, kept),), ((all_of_it, _, kept_whole),) in zip(sharded, whole, strict=True):
        assert 0 < own <= 0.3 * everything
        assert all_of_it == everything
        # Gradients too, and whatever else lies about between two steps.
        assert 0 < kept <= 0.4 * kept_whole


@pytest.mark.parametrize("kind", ["nan", "infinity"])
def test_a_nan_on_one_rank_ends_all_of_them_alike(tmp_path: Path, run_ranks, kind: str) -> None:
    one = make_job(tmp_path, **SHAPE, dist__strategy="fsdp")
    said = [text for (text,) in run_ranks(2, (diverged, (one, kind)))]
    assert said[0] == said[1]
    assert "the gradient of step 7 is not finite, and no weight was updated since" in said[0]


def broken(group: Any, job: Job) -> str:
    """What is said by a training in which one number of one rank's part of the gradients is NaN."""
    patch, steps = pytest.MonkeyPatch(), Counter[Any]()
    reduce_scatter = fsdp.OrderedReduceScatter.__call__

    def breaking_step(backward: Any, self: Any, step: int) -> Any:
        totals = backward(self, step)
        if step == STEP and group.rank == 1:
            next(one.grad for one in self.parameters.values() if one.numel()).view(-1)[0] = math.nan
        return totals

    def breaking(self: Any, output_tensor: Tensor, **rest: Any) -> None:
        reduce_scatter(self, output_tensor, **rest)
        if self.lane == self._own[-1]:
            steps[self] += 1
            if steps[self] == 1 + STEP and group.rank == 1:
                output_tensor.view(-1)[0] = math.nan

    patch.setattr(fsdp.OrderedReduceScatter, "__call__", breaking)
    for kind in (pipeline.Pipeline, tensor.TensorParallel):
        patch.setattr(kind, "backward", partialmethod(partial(breaking_step, kind.backward)))
    train_rank.fix_bits(1)
    try:
        with pytest.raises(Diverged) as error:
            train_rank.train(job, group, Silent())
    finally:
        patch.undo()
    return str(error.value)


@pytest.mark.parametrize(
    ("strategy", "size", "replicas"),
    [("fsdp", 2, 1), ("pipeline", 2, 1), ("pipeline", 3, 1), ("fsdp", 4, 2), ("pipeline", 4, 2), ("tensor", 2, 1)],
)
def test_a_nan_in_one_ranks_part_ends_all_of_them_alike(tmp_path: Path, run_ranks, strategy: str, size: int, replicas: int) -> None:
    shape = {
        **SHAPE,
        "dist__strategy": strategy,
        "dist__world_size": size,
        "dist__replicas": replicas,
        "dist__batch_size_per_gpu": None,
        "dist__global_batch": 48,
    }
    if strategy == "tensor":
        shape |= {"dist__reduction": "native", "dist__lanes": None}
    said = [text for (text,) in run_ranks(size, (broken, (make_job(tmp_path, **shape),)))]
    assert len(said) == size
    assert len(set(said)) == 1
    assert f"the gradient of step {STEP} is not finite, and no weight was updated since" in said[0]


def test_a_block_is_no_large_part_of_a_model_that_has_parts() -> None:
    for name in ("resnet18", "torchvision:resnet50", "torchvision:vit_b_16", "torchvision:maxvit_t", "torchvision:densenet121"):
        with torch.device("meta"):
            model = models.build(name, 1, 224, 10)
        whole = sum(one.numel() for one in model.parameters())
        blocks = fsdp.blocks(model)
        assert blocks
        known = {id(block) for block in blocks}
        for block in blocks:
            inside = {id(one) for other in block.modules() if other is not block and id(other) in known for one in other.parameters()}
            rest = sum(one.numel() for one in block.parameters() if id(one) not in inside)
            leaf = not any(True for _ in block.children())
            assert leaf or rest <= whole / 4, (name, rest / whole)
