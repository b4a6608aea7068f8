"""`native` on one rank against the loop that everyone writes, bit for bit: what a setting does to the weights is what torch does."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.nn import functional as F
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from pipeline import models
from pipeline.config import draw_seed
from pipeline.data import store
from pipeline.job import Job
from pipeline.tracking.journal import Journal
from pipeline.training import train_rank
from pipeline.training.checkpoint_file import weights_sha256
from pipeline.training.schedule import Schedule
from tests.kit.experiment import make_job

# A power of two: a mean and a sum divided once by the number of images are then the same bits.
BATCH, SEED = 64, 1
SHAPE: dict[str, Any] = {
    "data": {"name": "synthetic:400", "validation_share": 0.2},
    "model__name": "lenet",
    "train__epochs": 3,
    "dist__world_size": 1,
    "dist__batch_size_per_gpu": BATCH,
    "dist__reduction": "native",
    "dist__lanes": None,
}
CASES: dict[str, dict[str, Any]] = {
    "sgd, cosine": {},
    "sgd, constant, label smoothing": {"train__schedule": "constant", "train__label_smoothing": 0.1},
    "adamw, two micro-batches": {
        "train__optimizer": "adamw",
        "train__momentum": None,
        "train__weight_decay": 0.05,
        "train__learning_rate": 0.002,
        "dist__accumulation": 2,
        "dist__batch_size_per_gpu": BATCH // 2,
    },
}


def plain(_: Any, job: Job) -> str:
    """The digest of the weights after a loop that knows nothing of ranks and lanes."""
    train, accumulation = job.config.train, job.config.dist.accumulation
    manifest, split = store.read_manifest(job.prepared), store.open_split(job.prepared, "train")
    mean, std = (torch.tensor(values)[None, :, None, None] for values in (manifest.mean, manifest.std))
    images = (torch.from_numpy(split.images).float() / 255 - mean) / std
    labels, count = torch.from_numpy(split.labels), len(split.labels)
    torch.manual_seed(draw_seed(SEED, "weights"))
    model = models.build("lenet", 1, 28, 10).to(memory_format=torch.channels_last)
    optimizer: torch.optim.Optimizer
    if train.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=train.weight_decay, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), momentum=train.momentum or 0.0, weight_decay=train.weight_decay, fused=True)
    per_epoch = count // BATCH
    total = per_epoch * train.epochs
    for step in range(total):
        epoch, within = divmod(step, per_epoch)
        # One epoch of warm-up, and then a half cosine.
        falling = 1.0 if train.schedule == "constant" else (1 + math.cos(math.pi * (step - per_epoch) / (total - per_epoch))) / 2
        rate = train.learning_rate * (step + 1) / per_epoch if epoch == 0 else train.learning_rate * falling
        optimizer.param_groups[0]["lr"] = rate
        shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(draw_seed(SEED, "order", epoch)))
        optimizer.zero_grad()
        for picked in shuffled[within * BATCH : (within + 1) * BATCH].chunk(accumulation):
            inputs = images[picked].contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(model(inputs), labels[picked], label_smoothing=train.label_smoothing)
            (loss / accumulation).backward()
        optimizer.step()
    return weights_sha256(model.state_dict())


def ours(group: Any, job: Job) -> str:
    train_rank.fix_bits(job.config.dist.threads_per_rank)
    state, _, finished = train_rank.train(job, group, Journal(job.journal))
    assert finished
    return weights_sha256(state.weights())


def test_native_on_one_rank_is_a_plain_loop_bit_for_bit(tmp_path: Path, run_ranks) -> None:
    jobs = [make_job(tmp_path / name, **SHAPE | changes) for name, changes in CASES.items()]
    for job in jobs:
        # 400 images, of which a fifth is held out.
        assert store.read_manifest(job.prepared).counts == {"train": 320, "validation": 80, "test": 200}
    (found,) = run_ranks(1, *((ours, (job,)) for job in jobs), *((plain, (job,)) for job in jobs))
    assert dict(zip(CASES, found[: len(jobs)], strict=True)) == dict(zip(CASES, found[len(jobs) :], strict=True))
    assert len(set(found)) == len(CASES)


def rates(kind: str, peak: float, warmup_steps: int, total_steps: int) -> list[float]:
    """What torch's own schedulers give to every step."""
    optimizer = torch.optim.SGD([Parameter(torch.zeros(1))], lr=peak)
    falling: LRScheduler = (
        ConstantLR(optimizer, 1.0, 1) if kind == "constant" else CosineAnnealingLR(optimizer, max(1, total_steps - warmup_steps))
    )
    whole = falling
    if warmup_steps:
        # From a part of the peak to all of it in the last step of the warm-up.
        rising = LinearLR(optimizer, 1 / warmup_steps, 1.0, max(1, warmup_steps - 1))
        whole = SequentialLR(optimizer, [rising, falling], [warmup_steps])
    found = []
    for _ in range(total_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        whole.step()
    return found


@pytest.mark.parametrize("kind", ["cosine", "constant"])
@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 40), (1, 40), (10, 40), (39, 40), (40, 40), (211, 2110)])
def test_the_rate_of_every_step_is_that_of_torchs_schedulers(kind: str, warmup_steps: int, total_steps: int) -> None:
    ours = Schedule(kind, 0.3, warmup_steps, total_steps)
    assert [ours.rate(step) for step in range(total_steps)] == pytest.approx(
        rates(kind, 0.3, warmup_steps, total_steps), rel=1e-9, abs=1e-12
    )
