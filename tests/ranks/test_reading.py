"""However images are read: from memory, from mapped files, ahead, or decoded while training, a training ends in the same bits."""

from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch

from pipeline.config.sections import Mix, Step
from pipeline.data import Split
from pipeline.data.originals import Originals
from pipeline.job import Job
from pipeline.training import work
from tests.kit.experiment import make_job
from tests.ranks.test_bits import trained
from tests.unit.data.test_imagefolder import fill

STEPS = [*get_args(Step), *get_args(Mix)]
SHAPE: dict[str, Any] = {
    "model__name": "lenet",
    "dist__batch_size_per_gpu": None,
    "dist__global_batch": 24,
    "dist__lanes": 3,
    "train__class_weights": "balanced",
}


def job_of(folder: Path, run: str, size: int, store: str) -> Job:
    data = {"name": "imagefolder", "root": str(folder / "images"), "image_size": 28, "augment": STEPS, "store": store}
    job = make_job(folder / store, **SHAPE, data=data, dist__world_size=size)
    return job.model_copy(update={"run": folder / store / run})


def read_in(group: Any, job: Job, way: str) -> tuple[str, int]:
    """Train on this rank, with images read in a way that a machine's memory may ask for."""
    found = work.open_splits

    def opened(job: Job, device: torch.device) -> tuple[Split, Split, bool]:
        *splits, hold = found(job, device)
        if way == "memory":
            splits = [Split(np.array(split.images), np.array(split.labels)) for split in splits]
        assert hold == (way != "originals")
        assert isinstance(splits[0].images, Originals) == (way == "originals")
        return splits[0], splits[1], way in ("memory", "mapped")

    with patch.object(work, "open_splits", opened):
        return trained(group, job, None)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_way_of_reading_gives_the_bits_of_every_other(size: int, tmp_path: Path, run_ranks: Any) -> None:
    fill(tmp_path / "images", 60)
    ways = {"memory": "pixels", "mapped": "pixels", "ahead": "pixels", "originals": "originals"}
    work = [(read_in, (job_of(tmp_path, f"{way}-{size}", size, store), way)) for way, store in ways.items()]
    results = [result for rank in run_ranks(size, *work) for result in rank]
    assert len(results) == 4 * size
    assert len(set(results)) == 1, results
    alone = results[0] if size == 1 else run_ranks(1, (read_in, (job_of(tmp_path, "alone", 1, "pixels"), "mapped")))[0][0]
    assert results[0] == alone
