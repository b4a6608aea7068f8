"""What becomes of a training when one of its ranks is killed, stops, hangs, breaks or leaves the numbers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from pipeline.tracking.journal import last
from tests.kit.compose import free_port
from tests.kit.experiment import LONGER, ROOT, Experiment, clean_environment
from tests.kit.trainings import mlflow_runs, ranks_of, same_figures, status, wait_for_step
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]


def with_fault(experiment: Experiment, fault: str, expect: int) -> str:
    """Train with a fault built into one rank."""
    command = [sys.executable, "-m", "tests.kit.faulty", "train", "--params", str(experiment.params)]
    environment = clean_environment() | {"FAULT": fault}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == expect, done.stdout
    return done.stdout


def fresh_ranks(process: subprocess.Popen[str], old: list[psutil.Process], count: int = 2) -> list[psutil.Process]:
    """The ranks of the next attempt, once all of them are there."""

    def found() -> list[psutil.Process]:
        ranks = [one for one in ranks_of(process) if one not in old]
        return ranks if len(ranks) == count else []

    return until(found, process, every_seconds=0.02)


@pytest.mark.fault(1, "SIGKILL of rank 1; later again, with rank 0 stopped so that it cannot notice")
def test_the_peers_of_a_killed_rank_stop_within_ten_seconds_and_all_start_again(
    baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    # Every attempt meets at this port.
    experiment.set(**LONGER, dist__init_method=f"tcp://127.0.0.1:{free_port()}").run("prepare")
    process = experiment.start("train")
    took = []
    old: list[psutil.Process] = []
    for step in (30, 120):
        wait_for_step(experiment, step, process)
        first, second = old = fresh_ranks(process, [])
        if step == 120:
            first.suspend()
        second.kill()
        started_at = time.monotonic()
        assert not psutil.wait_procs([first], timeout=10)[1]
        took.append(time.monotonic() - started_at)
        fresh_ranks(process, old)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert len(re.findall(r"rank 1 was ended by SIGKILL in step \d+; starting again from .*safetensors", said)) == 2
    same_figures(experiment, baseline)
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]
    record_property("happened", f"peers gone after {took[0]:.1f} and {took[1]:.1f} s, started again, bit-equal, one MLflow run")


@pytest.mark.timeout(900)
@pytest.mark.fault(28, "ten SIGKILLs of ranks in one run, three of them while it resumed, at an epoch's end and at the last step")
def test_ten_kills_cost_no_bit_and_no_epoch(baseline: Experiment, experiment: Experiment, record_property: Note) -> None:
    # Every attempt finds the keys of those before it there.
    experiment.set(**LONGER, dist__init_method=f"file://{experiment.folder}/meeting").run("prepare")
    process = experiment.start("train")
    old: list[psutil.Process] = []
    # None: as soon as the ranks of the next attempt are there.
    for number, step in enumerate((10, None, 40, 56, None, 80, 112, None, 168, 222)):
        if step is not None:
            wait_for_step(experiment, step, process)
        old = fresh_ranks(process, old)
        old[number % 2].kill()
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert said.count("; starting again from ") == 10, said
    assert "SIGTERM" not in said, "torchrun's own signal is no cause"
    same_figures(experiment, baseline)
    record_property("happened", "ten restarts, bit-equal, every figure once")


@pytest.mark.fault(5, "SIGSTOP of rank 1 for 3 s, and then for good, with a timeout of 8 s")
def test_a_stopped_rank_is_warned_of_and_then_named_with_the_stacks_of_all(experiment: Experiment, record_property: Note) -> None:
    experiment.set(**LONGER, dist__timeout_seconds=8).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 20, process)
    for seconds in (3, 0):
        victim = ranks_of(process)[1]
        victim.suspend()
        if seconds:
            time.sleep(seconds)
            victim.resume()
            wait_for_step(experiment, 40, process)
    started_at = time.monotonic()
    said, _ = process.communicate(timeout=60)
    late_seconds = time.monotonic() - started_at
    assert process.returncode == 6, said
    assert late_seconds < 8 + 10
    assert said.count("and may be for 8 s (dist.timeout_seconds)") == 1
    assert "rank 1 is stopped (SIGSTOP) in step" in said
    assert status(experiment)["rank"] == 1
    stacks = [path.read_text() for path in experiment.run_folder.glob("logs/*/*/attempt_0/*/stacks.log")]
    assert len(stacks) == 2
    assert all("most recent call first" in one for one in stacks)
    assert all("pipeline/training/loop.py" in one for one in stacks)
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FAILED"]
    record_property("happened", f"warned once; then exit 6 after {late_seconds:.0f} s, rank 1 named, stacks of both")


@pytest.mark.fault(1, "SIGKILL of rank 1 in step 12, in every attempt")
def test_a_rank_that_is_lost_again_and_again_without_getting_on_ends_the_job(experiment: Experiment, record_property: Note) -> None:
    experiment.set(**LONGER | {"checkpoint__every_steps": 5}).run("prepare")
    said = with_fault(experiment, "killed:1:12", 6)
    cause = "rank 1 was ended by SIGKILL in step 12"
    assert len(re.findall(rf"{cause}; starting again from .*step-00000010", said)) == 3
    assert f"{cause}; 3 starts in a row got no further than step 12" in said, said
    assert (status(experiment)["exit_code"], status(experiment)["rank"]) == (6, 1)
    assert status(experiment)["checkpoint"].endswith("step-00000010.safetensors")
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FAILED"]
    record_property("happened", "three restarts, then exit 6: 3 starts in a row got no further than step 12")


@pytest.mark.fault(5, "rank 1 hangs in Python, timeout 5 s, under `native` and `ordered`; rank 0 is 0.2 s slower in every step")
def test_a_hanging_rank_is_named_and_a_slow_one_is_warned_of_once(experiment: Experiment, record_property: Note) -> None:
    for reduction, lanes in (("native", None), ("ordered", 4)):
        experiment.set(**LONGER, dist__timeout_seconds=10, dist__reduction=reduction, dist__lanes=lanes).run("prepare")
        said = with_fault(experiment, "hang:1:12", 6)
        assert "rank 1 stands still in step 12" in said, said
        ends = [json.loads(path.read_text()) for path in experiment.folder.glob("runs/*/status.json")]
        assert all(end["rank"] == 1 and end["cause"].startswith("rank 1 stands still in step 12") for end in ends), ends
    stacks = [path.read_text() for path in experiment.folder.glob("runs/*/logs/**/stacks.log")]
    assert len(stacks) == 4
    assert sum("in hang" in one for one in stacks) == 2
    experiment.set(**LONGER | {"train__epochs": 1}).run("prepare")
    said = with_fault(experiment, "slow:0:0", 0)
    assert said.count("rank 0 is slow: the others wait for it") == 1, said
    run = experiment.folder / "runs" / experiment.json("models/receipt.json")["fingerprint"]
    described = last(run / "journal.jsonl", "description")
    fast, slow = map(float, re.findall(r"([0-9.]+) ms on rank 1 to ([0-9.]+) ms on rank 0 \|", described["text"])[0])
    # It sleeps for 0.1 s in each of its two lanes.
    assert slow - fast > 150
    assert described["images"] == ["plots/curves.png", "plots/ranks.png"]
    assert (run / "plots" / "ranks.png").stat().st_size > 5000
    record_property("happened", "exit 6 with the line that hung in its stack; then one warning, exit 0")


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param("raising:1:12", "rank 1 failed in step 12: RuntimeError: the cable is loose", id="raises"),
        pytest.param("segfault:1:12", "rank 1 was ended by SIGSEGV in step 12", id="segfaults"),
        pytest.param("abort:0:12", "rank 0 was ended by SIGABRT in step 12", id="aborts"),
    ],
)
@pytest.mark.fault(6, "a rank raises, segfaults, aborts, always in step 12")
def test_the_first_cause_is_reported_and_a_step_that_fails_twice_ends_it(
    experiment: Experiment, fault: str, cause: str, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    said = with_fault(experiment, fault, 6)
    assert f"{cause}; starting again from" in said
    assert f"{cause}; step 12 has failed twice" in said
    assert "onnection" not in said
    assert status(experiment)["cause"].startswith(cause)
    assert status(experiment)["rank"] == int(fault.split(":")[1])
    if fault.startswith("raising"):
        # The traceback, in the file that the line names.
        log = Path(status(experiment)["cause"].rpartition("logs: ")[2])
        assert log.name == "stderr.log"
        assert "Traceback" in log.read_text()
        assert log.read_text().endswith("RuntimeError: the cable is loose\n")
    record_property("happened", f"exit 6: {cause}; step 12 has failed twice")


@pytest.mark.fault(7, "an allocation fails in rank 1, always in step 12")
def test_want_of_memory_is_said_plainly_with_what_to_lower(experiment: Experiment, record_property: Note) -> None:
    experiment.set(**LONGER).run("prepare")
    said = with_fault(experiment, "memory:1:12", 4)
    assert said.count("rank 1 ran out of memory in step 12; lower dist.batch_size_per_gpu (48)") == 2, said
    assert status(experiment)["outcome"] == "machine"
    record_property("happened", "one restart, then exit 4: ran out of memory in step 12; lower dist.batch_size_per_gpu (48)")


@pytest.mark.fault(15, "one pixel of rank 1's lane is NaN in step 33")
def test_a_nan_on_one_rank_stops_all_before_the_update_and_its_samples_are_written_down(
    experiment: Experiment, record_property: Note
) -> None:
    experiment.set(**LONGER | {"checkpoint__every_steps": 1}).run("prepare")
    said = with_fault(experiment, "nan:1:33", 5)
    assert said.count("training diverged: the gradient of step 33 is not finite") == 1
    found = json.loads((experiment.run_folder / "diverged.json").read_text())
    assert found["step"] == 33
    assert [len(one["samples"]) for one in found["lanes"]] == [24] * 4
    # Rank 1 owns the lanes 2 and 3, and each of them began with such a pixel.
    assert found["lanes_without_a_loss"] == [2, 3]
    kept = sorted((experiment.run_folder / "checkpoints").glob("step-*.safetensors"))
    assert kept[-1].name == "step-00000033.safetensors", "the state before the update, and none after it"
    for path in kept:
        assert all(value.isfinite().all() for value in load_file(path).values())
    assert status(experiment)["outcome"] == "diverged"
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FAILED"]
    # Left alone, it goes on from there.
    experiment.run("train")
    record_property("happened", "exit 5; newest checkpoint is step 33, finite; lanes 2 and 3 written down; without the NaN it goes on")


@pytest.mark.fault(3, "SIGTERM to torchrun")
def test_a_sigterm_to_torchrun_stops_all_ranks_at_one_step(baseline: Experiment, experiment: Experiment, record_property: Note) -> None:
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 60, process)
    children = psutil.Process(process.pid).children(recursive=True)
    (torchrun,) = [one for one in children if "pipeline.launch.agent" in one.cmdline()]
    os.kill(torchrun.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert Path(status(experiment)["checkpoint"]).name == f"step-{status(experiment)['step']:08d}.safetensors"
    assert [run.info.status for run in mlflow_runs(experiment)] == ["KILLED"]
    experiment.run("train")
    same_figures(experiment, baseline)
    record_property("happened", "exit 75, saved, no orphan, KILLED; went on bit-equal")
