"""The experiment that is shipped, on the data that it is shipped for: one epoch of it has the same bits on 1 and 4 ranks."""

from pathlib import Path

import pytest

from pipeline import prepare
from pipeline.config import Config
from pipeline.config.params import load
from pipeline.files import Paths
from pipeline.hardware import machine
from pipeline.hardware.placement import resolve
from pipeline.job import Job
from pipeline.ranks import Ranks
from pipeline.tracking.journal import Journal, Silent, read
from pipeline.training import train_rank
from pipeline.training.checkpoint_file import weights_sha256
from tests.kit.experiment import ROOT


def on(size: int) -> Config:
    """One epoch of params.yaml on so many ranks."""
    shipped = load(ROOT / "params.yaml")
    placement = {"world_size": size, "batch_size_per_gpu": shipped.dist.images_per_step // size}
    changes = {"train": shipped.train.model_copy(update={"epochs": 1}), "dist": shipped.dist.model_copy(update=placement)}
    return Config.model_validate(shipped.model_copy(update=changes).model_dump())


def trained(group: Ranks, job: Job) -> str:
    train_rank.fix_bits(job.config.dist.threads_per_rank)
    state, step, finished = train_rank.train(job, group, group.on_rank_zero(lambda: Journal(job.journal), Silent()))
    assert (step, finished) == (210, True)
    return weights_sha256(state.weights())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_shipped_experiment_has_the_same_bits_on_any_ranks(tmp_path: Path, run_ranks) -> None:
    paths = Paths(tmp_path / "params.yaml")
    assert prepare.run(on(2), paths) == 0
    precision = resolve(on(2), machine.detect()).precision
    digests: set[str] = set()
    for size in (1, 4):
        job = Job(config=on(size), device="cpu", backend="gloo", precision=precision, prepared=paths.prepared, run=tmp_path / f"{size}")
        digests.update(result for (result,) in run_ranks(size, (trained, (job,))))
        accuracy = [line["values"]["validation/accuracy"] for line in read(job.journal) if "validation/accuracy" in line.get("values", {})]
        # It has learned: equal bits of nothing would prove nothing.
        assert accuracy[-1] > 0.7
    assert len(digests) == 1
