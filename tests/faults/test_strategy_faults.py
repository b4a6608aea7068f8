"""What becomes of a training under each strategy when a rank is killed, when it is stopped, and when another strategy goes on."""

import re
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.experiment import LONGER, Experiment
from tests.kit.trainings import ranks_of, same_figures, wait_for_step, weights

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]
# Who goes on with one training, one after another; each loses a rank, and each but the last is stopped.
RELAY: list[dict[str, Any]] = [
    {"strategy": "ddp", "world_size": 2},
    {"strategy": "allreduce", "world_size": 3},
    {"strategy": "fsdp", "world_size": 4},
    {"strategy": "pipeline", "world_size": 2},
    {"strategy": "fsdp", "world_size": 4, "replicas": 2},
    {"strategy": "dataparallel", "world_size": 1},
    {"strategy": "pipeline", "world_size": 4, "replicas": 2},
    {"strategy": "graphs", "world_size": 2, "start_method": "spawn"},
]
EVERY_STEPS = 10


def placed(**dist: Any) -> dict[str, Any]:
    """The long experiment with its global batch, on these ranks."""
    values = {"batch_size_per_gpu": None, "global_batch": 96} | dist
    return LONGER | {"checkpoint__every_steps": EVERY_STEPS} | {f"dist__{key}": value for key, value in values.items()}


def losses_of(experiment: Experiment) -> list[float]:
    return [line["values"]["train/loss"] for line in experiment.journal("metrics") if "train/loss" in line["values"]]


def lose_a_rank(experiment: Experiment, step: int, *words: str) -> Any:
    """Train, and kill the last rank after this step; returns the process once it has trained on."""
    process = experiment.start("train", *words)
    wait_for_step(experiment, step, process)
    ranks_of(process)[-1].kill()
    wait_for_step(experiment, step + EVERY_STEPS, process)
    return process


@pytest.mark.fault(
    1, "SIGKILL of the last rank, and then SIGTERM, under every strategy that promises bits; the next one goes on with --resume"
)
def test_strategies_go_on_from_each_other_through_kills_and_stops(
    baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    experiment.set(**placed(**RELAY[0])).run("prepare")
    words: list[str] = []
    for number, dist in enumerate(RELAY):
        experiment.set(**placed(**dist))
        process = lose_a_rank(experiment, 24 * number + 12, *words)
        last = number == len(RELAY) - 1
        if not last:
            process.terminate()
        said, _ = process.communicate(timeout=120)
        assert process.returncode == (0 if last else 75), said
        assert re.search(rf"rank {dist['world_size'] - 1} was ended by SIGKILL in step \d+; starting again", said), said
        if number and RELAY[number - 1]["strategy"] != dist["strategy"]:
            assert f"with dist.strategy {RELAY[number - 1]['strategy']} -> {dist['strategy']}: the same samples in the same order" in said
            assert said.count("none left out; with the same bits") == 1
        if not last:
            left = experiment.folder / f"left by {number}"
            shutil.move(experiment.run_folder, left)
            words = ["--resume", str(left)]
    same_figures(experiment, baseline, but="fingerprint")
    record_property(
        "happened", f"{len(RELAY)} strategies, each lost a rank, seven were stopped with 75: every figure and bit of one ddp run"
    )


@pytest.mark.fault(1, "SIGKILL of a rank and SIGTERM under strategy tensor, on the same ranks; --resume of ddp from it")
def test_tensor_parallel_goes_on_with_its_own_bits_and_hands_over_to_ddp(experiment: Experiment, record_property: Note) -> None:
    native = {"reduction": "native", "lanes": None, "global_batch": 96, "world_size": 2}
    experiment.set(**placed(**native, strategy="tensor") | {"train__epochs": 2}).run("prepare")
    experiment.run("train")
    alone, losses = weights(experiment), losses_of(experiment)
    shutil.rmtree(experiment.run_folder)
    process = lose_a_rank(experiment, 30)
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    left = experiment.folder / "left"
    shutil.copytree(experiment.run_folder, left)
    experiment.run("train")
    assert weights(experiment) == alone
    shutil.rmtree(experiment.run_folder)
    experiment.set(**placed(**native, strategy="ddp") | {"train__epochs": 2})
    said = experiment.run("train", "--resume", str(left))
    assert "dist.strategy tensor -> ddp" in said
    assert "the bits are those of neither" in said
    assert losses_of(experiment) == pytest.approx(losses, rel=1e-3)
    record_property("happened", "the bits of tensor left alone; ddp went on within 1e-3 of its losses")


@pytest.mark.fault(5, "SIGSTOP of a spawned rank for good, with a timeout of 5 s")
def test_a_spawned_rank_that_hangs_is_named(experiment: Experiment, record_property: Note) -> None:
    experiment.set(**LONGER, dist__start_method="spawn", dist__timeout_seconds=5).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 20, process)
    ranks_of(process)[1].suspend()
    stopped_at = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 6, said
    assert "rank 1 is stopped (SIGSTOP) in step" in said
    record_property("happened", f"exit 6 after {time.monotonic() - stopped_at:.1f} s; rank 1 named")
