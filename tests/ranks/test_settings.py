"""Clipping, the average of the weights and a scaled learning rate in whole trainings: what they do, and the same bits everywhere."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pipeline.job import Job
from pipeline.tracking.journal import read
from pipeline.training.checkpoint_file import facts_of
from tests.kit.experiment import make_job
from tests.ranks.test_bits import trained

SHAPE: dict[str, Any] = {"data": {"name": "synthetic:336"}, "model__name": "mlp", "train__epochs": 3}
# With every validation, and all of them kept.
SHAPE |= {"checkpoint__every_steps": 6, "checkpoint__keep": 9}
# The norm is below that of every gradient here.
SETTINGS = {"train__clip_norm": 0.05, "train__ema_decay": 0.8, "train__scale_learning_rate": "linear", "train__base_batch": 24}
STEPS = 18


def job_of(folder: Path, run: str, size: int, strategy: str = "ddp", **changes: Any) -> Job:
    placement = {"dist__world_size": size, "dist__batch_size_per_gpu": None, "dist__global_batch": 48, "dist__strategy": strategy}
    return make_job(folder, **SHAPE | placement | changes).model_copy(update={"run": folder / run})


def files(job: Job) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in job.checkpoints.glob("*.safetensors")}


def lines(job: Job) -> dict[tuple[int, str], float]:
    """Every figure of learning in the journal, each of which is there once."""
    told = [(line["step"], *one) for line in read(job.journal) if line["kind"] == "metrics" for one in line["values"].items()]
    found = {(step, name): value for step, name, value in told if name.startswith(("train/", "validation/")) and "per_second" not in name}
    assert len({(step, name) for step, name, _ in told}) == len(told)
    return found


def figures(job: Job, name: str) -> list[float]:
    return [line["values"][name] for line in read(job.journal) if line["kind"] == "metrics" and name in line["values"]]


def test_checkpoints_have_the_same_bits_on_any_ranks_and_through_stops(tmp_path: Path, run_ranks) -> None:
    alone = job_of(tmp_path, "alone", 1, **SETTINGS)
    ((expected,),) = run_ranks(1, (trained, (alone, None)))
    for size, strategy in ((2, "ddp"), (3, "allreduce")):
        other = job_of(tmp_path, f"{strategy}-{size}", size, strategy, **SETTINGS)
        assert all(found == [expected] for found in run_ranks(size, (trained, (other, None))))
        # Weights, momenta, averages and the best model.
        assert files(other) == files(alone)
        assert lines(other) == lines(alone)
    assert {"train/top5_accuracy", "validation/top5_accuracy"} <= {name for _, name in lines(alone)}
    for size, stop in ((2, 5), (3, 11), (1, None)):
        stopped = job_of(tmp_path, "stopped", size, **SETTINGS)
        found = run_ranks(size, (trained, (stopped, stop)))[0]
    assert found == [expected]
    last = f"step-{STEPS:08d}.safetensors"
    assert files(stopped)[last] == files(alone)[last]
    assert lines(stopped) == lines(alone)
    assert {name for name in files(stopped) if name.startswith("best-")} == {name for name in files(alone) if name.startswith("best-")}


def test_each_does_in_a_training_what_it_is_for(tmp_path: Path, run_ranks) -> None:
    plain = job_of(tmp_path, "plain", 2)
    ((without,), _) = run_ranks(2, (trained, (plain, None)))
    assert figures(plain, "train/gradient_norm") == []
    for key, value in SETTINGS.items():
        if key == "train__base_batch":
            continue
        changes = {key: value} | ({"train__base_batch": 24} if "scale" in key else {})
        one = job_of(tmp_path, key, 2, **changes)
        ((digest,), _) = run_ranks(2, (trained, (one, None)))
        if key == "train__ema_decay":
            # The weights are those of a training without it; what is validated and kept as the best is the average.
            assert digest == without
            best = next(one.checkpoints.glob("best-*"))
            tensors = load_file(one.checkpoints / f"step-{int(facts_of(best)['step']):08d}.safetensors")
            averages = {name.removeprefix("average."): tensor for name, tensor in tensors.items() if name.startswith("average.")}
            assert averages
            assert all(tensor.equal(load_file(best)[name]) for name, tensor in averages.items())
            assert figures(one, "validation/loss") != figures(plain, "validation/loss")
        else:
            assert digest != without
        if key == "train__clip_norm":
            assert min(figures(one, "train/gradient_norm")) > SETTINGS[key]
        if "scale" in key:
            assert figures(one, "train/learning_rate") == [pytest.approx(2 * rate) for rate in figures(plain, "train/learning_rate")]


def test_a_change_of_how_often_is_logged_neither_loses_a_figure_nor_writes_one_twice(tmp_path: Path, run_ranks) -> None:
    every, seldom = job_of(tmp_path, "every", 2), job_of(tmp_path, "changed", 2, tracking__log_every_steps=4)
    ((expected, (_, step)), _) = run_ranks(2, (trained, (every, None)), (trained, (seldom, 8)))
    assert step < 12
    before = lines(seldom)
    assert sorted({one for one, name in before if name.startswith("train/")}) == [4, 6, 8]
    # As a kill leaves it: figures up to step 8, and a checkpoint of step 6.
    for path in [*seldom.checkpoints.glob("step-*"), seldom.checkpoints / "index.json"]:
        if path.name != "step-00000006.safetensors":
            path.unlink()
    often = job_of(tmp_path, "changed", 1, tracking__log_every_steps=1)
    assert run_ranks(1, (trained, (often, None))) == [[expected]]
    found, all_of_them = lines(often), lines(every)
    assert before.items() <= found.items() <= all_of_them.items()
    # The new distance holds from behind the last line.
    assert all_of_them.keys() - found.keys() == {key for key in all_of_them if key[0] in (1, 2, 3, 5, 7)}
