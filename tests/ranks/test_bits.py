"""The promise: the same weights on any number of ranks, whoever owns the lanes, and through interruptions."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.job import Job
from pipeline.tracking.journal import Journal, Silent, last
from pipeline.training import train_rank
from pipeline.training.checkpoint import weights_sha256
from tests.kit.experiment import make_job

# Six steps an epoch, 18 in all.
SHAPE: dict[str, Any] = {"data": {"name": "synthetic:336"}, "train__epochs": 3, "train__learning_rate": 0.02, "checkpoint__every_steps": 4}
CASES: dict[str, dict[str, Any]] = {
    "lenet, crop-flip, bf16": {"model__name": "lenet", "data": {"name": "synthetic:336", "augment": "crop-flip"}, "precision": "bf16"},
    "mlp with dropout, fp32": {"model__name": "mlp"},
    "mlp with dropout, adamw, bf16": {"model__name": "mlp", "precision": "bf16", "train__optimizer": "adamw", "train__momentum": None},
    "resnet18, crop-flip, fp32": {
        "model__name": "resnet18",
        "data": {"name": "synthetic:336", "augment": "crop-flip", "image_size": 12},
        "train__learning_rate": 0.01,
    },
    "resnet18, bf16": {"model__name": "resnet18", "data": {"name": "synthetic:336", "image_size": 12}, "precision": "bf16"},
}
PLACEMENTS: dict[int, list[list[int] | None]] = {1: [None], 2: [None, [3, 1]], 3: [None, [1, 1, 2]], 4: [None]}


def job_of(folder: Path, case: str, size: int, share: list[int] | None, run: str) -> Job:
    """The case on some ranks: the global batch is 48 and has four lanes on all of them."""
    placement = {"dist__world_size": size, "dist__batch_size_per_gpu": 48 // size, "dist__lanes": 4, "dist__lanes_per_rank": share}
    job = make_job(folder / case, **(SHAPE | CASES[case] | placement))
    return job.model_copy(update={"run": folder / case / run})


def trained(group: Any, job: Job, stop_after: int | None) -> tuple[str, int]:
    """Train on this rank; a real SIGTERM reaches the last rank, and only it, when the journal passes a step."""
    train_rank.fix_bits(job)
    journal = group.only_first(lambda: Journal(job.journal), Silent())
    if stop_after is not None and group.rank == group.size - 1:
        threading.Thread(target=terminate_after, args=(job.journal, stop_after), daemon=True).start()
    model, step, _ = train_rank.train(job, group, journal)
    return weights_sha256(model.state_dict()), step


def terminate_after(journal: Path, step: int) -> None:
    while last(journal, "metrics").get("step", 0) < step:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_weights_have_the_same_bits_on_any_ranks_and_through_stops(tmp_path: Path, run_ranks) -> None:
    expected: dict[str, str] = {}
    compared = 0
    for size, shares in PLACEMENTS.items():
        keys = [(case, share) for case in CASES for share in shares]
        work = [(trained, (job_of(tmp_path, case, size, share, f"{size}-{share}"), None)) for case, share in keys]
        for results in run_ranks(size, *work):
            for (case, share), (digest, step) in zip(keys, results, strict=True):
                assert step == 18
                assert digest == expected.setdefault(case, digest), (case, size, share)
                compared += 1
    assert compared == len(CASES) * (1 + 2 * 2 + 2 * 3 + 4)
    assert len(set(expected.values())) == len(CASES)

    # Stopped in the first epoch, in the middle of the second, and in the last; each time it goes on with other ranks.
    reached = dict.fromkeys(CASES, 0)
    for size, stop_after in ((2, 2), (3, 8), (1, 13), (2, None)):
        work = [(trained, (job_of(tmp_path, case, size, None, "stopped"), stop_after)) for case in CASES]
        for case, (digest, step) in zip(CASES, run_ranks(size, *work)[0], strict=True):
            assert step > reached[case]
            reached[case] = step
            if stop_after is None:
                assert (step, digest) == (18, expected[case]), case
            else:
                assert stop_after <= step < 18, (case, size)
