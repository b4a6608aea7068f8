"""Trainings that begin with the weights of a file and freeze modules: the same bits everywhere, and nothing frozen moves."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline import models
from pipeline.job import FirstWeights, Job
from tests.kit.experiment import make_job
from tests.ranks.test_bits import trained

NAME, FROZEN = "torchvision:shufflenet_v2_x0_5", ["conv1", "stage2"]
# Three lanes: the mean of three equal numbers may be another one.
SHAPE: dict[str, Any] = {
    "model__name": NAME,
    "train__epochs": 2,
    "dist__lanes": 3,
    "dist__batch_size_per_gpu": None,
    "dist__global_batch": 48,
}
SHAPE |= {"data": {"name": "synthetic:216", "image_size": 32}, "checkpoint__every_steps": 3, "dist__world_size": 1}


@pytest.fixture
def weights(tmp_path: Path) -> FirstWeights:
    """Of another number of classes, with statistics that no step has made."""
    torch.manual_seed(5)
    model = models.build(NAME, 1, 32, 7)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.9, 1.1)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    return FirstWeights(
        file=tmp_path / "weights.safetensors", sha256=hashlib.sha256((tmp_path / "weights.safetensors").read_bytes()).hexdigest()
    )


def job_of(folder: Path, run: str, weights: FirstWeights, **changes: Any) -> Job:
    values = SHAPE | {"model__weights": str(weights.file), "model__frozen": FROZEN} | changes
    return make_job(folder, **values).model_copy(update={"run": folder / run, "first_weights": weights})


def newest(job: Job) -> dict[str, Tensor]:
    return load_file(max(job.checkpoints.glob("step-*.safetensors")))


def test_frozen_modules_do_not_move_and_the_rest_has_the_same_bits_on_any_ranks(tmp_path: Path, weights: FirstWeights, run_ranks) -> None:
    alone = job_of(tmp_path, "alone", weights)
    ((expected,),) = run_ranks(1, (trained, (alone, None)))
    for size, strategy in ((2, "ddp"), (3, "allreduce"), (2, "graphs")):
        other = job_of(tmp_path, f"{strategy}-{size}", weights, dist__world_size=size, dist__strategy=strategy)
        assert all(found == [expected] for found in run_ranks(size, (trained, (other, None)))), strategy
    given, found = load_file(weights.file), newest(alone)
    kept = {name for name in given if any(name.startswith(f"model.{one}.") for one in FROZEN)}
    assert {name for name, one in given.items() if torch.equal(found[f"model.{name}"], one)} == kept
    # Nothing is kept for them either.
    assert not {name for name in found if any(name.startswith(f"optimizer.model.{one}.") for one in FROZEN)}
    assert "optimizer.model.stage3.0.branch1.0.weight.momentum_buffer" in found


def test_a_training_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path, weights: FirstWeights, run_ranks) -> None:
    whole, parts = job_of(tmp_path, "whole", weights), job_of(tmp_path, "parts", weights, dist__world_size=2)
    ((expected,),) = run_ranks(1, (trained, (whole, None)))
    first, second = run_ranks(2, (trained, (parts.model_copy(update={"until": 4}), None)))
    assert first == second != [expected]
    assert all(found == [expected] for found in run_ranks(2, (trained, (parts, None))))
