"""NaN and infinity on one rank, in an image or born in backward: decided on all ranks before the update."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.job import Job
from pipeline.parallel.ddp import Ddp
from pipeline.tracking.journal import Journal, Silent
from pipeline.training import train_rank, work
from pipeline.training.guard import Diverged
from tests.kit.devices import also_on_gpu
from tests.kit.experiment import make_job
from tests.kit.faulty import Fault

STEP = 7
SHAPE: dict[str, Any] = {"data": {"name": "synthetic:480"}, "model__name": "mlp", "checkpoint__every_steps": 1, "checkpoint__keep": 50}


def diverged(group: Any, job: Job, kind: str) -> str:
    """What is said by a training in which one number of rank 1 goes wrong."""
    patch = pytest.MonkeyPatch()
    if group.rank == 1 and kind == "backward":
        patch.setattr(work, "build_model", breaking(work.build_model, patch))
    elif group.rank == 1:
        batches = work.batches
        patch.setattr(work, "batches", lambda *parts: Fault(batches(*parts), kind, STEP))
    train_rank.fix_bits(job.config.dist.threads_per_rank)
    try:
        with pytest.raises(Diverged) as error:
            train_rank.train(job, group, group.on_rank_zero(lambda: Journal(job.journal), Silent()))
    finally:
        patch.undo()
    return str(error.value)


def breaking(build: Any, patch: pytest.MonkeyPatch) -> Any:
    """Build a model of which one gradient is NaN in one step, where the loss is a number."""
    backward, steps = Ddp.backward, list[int]()
    patch.setattr(Ddp, "backward", lambda self, step: (steps.append(step), backward(self, step))[1])

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        third = torch.arange(gradient.numel(), device=gradient.device).view_as(gradient) == 3
        return torch.where(third, float("nan"), gradient) if steps[-1] == STEP else gradient

    def build_it(*parts: Any) -> torch.nn.Module:
        model = build(*parts)
        next(model.parameters()).register_hook(spoil)
        return model

    return build_it


@pytest.mark.fault(15, "on one of two ranks: NaN and infinity in an image, NaN born in the gradient")
@also_on_gpu("G9: NaN on one rank ends all of them before the update")
def test_a_number_that_is_none_on_one_rank_ends_all_before_the_update(device: str, tmp_path: Path, run_ranks) -> None:
    kinds = ("nan", "infinity", "backward")
    jobs = [make_job(tmp_path / kind, **SHAPE).model_copy(update={"device": device}) for kind in kinds]
    first, second = run_ranks(2, *((diverged, (job, kind)) for job, kind in zip(jobs, kinds, strict=True)), device=device)
    assert first == second, "all ranks decide alike"
    for job, kind, said in zip(jobs, kinds, first, strict=True):
        assert f"the gradient of step {STEP} is not finite" in said, kind
        found = json.loads((job.run / "diverged.json").read_text())
        assert found["step"] == STEP
        assert found["lanes_without_a_loss"] == ([] if kind == "backward" else [2, 3])
        kept = sorted(job.checkpoints.glob("step-*.safetensors"))
        assert kept[-1].name == f"step-{STEP:08d}.safetensors", "the state before the update, and none after it"
        for path in kept:
            assert all(value.isfinite().all() for value in load_file(path).values())
