"""The train stage for real: torchrun, signals, restarts, recognition, and what MLflow is told."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.kit.experiment import LONGER, ROOT, Experiment, clean_environment
from tests.kit.trainings import (
    experiment_steps,
    mlflow_runs,
    ranks_of,
    same_figures,
    signal_twice,
    status,
    suspended,
    wait_for_step,
    weights,
)
from tests.kit.waiting import child_cpu_seconds, until

pytestmark = pytest.mark.slow


@pytest.mark.fault(3, "SIGTERM to train, SIGINT to it, SIGHUP to it, SIGTERM to one rank")
@pytest.mark.fault(21, "ordered: stopped on 2, 3, 2 and 1 ranks, ended on 2")
def test_stopped_anywhere_and_resumed_on_other_ranks_it_ends_with_the_same_bits(baseline: Experiment, experiment: Experiment) -> None:
    experiment.set(**LONGER).run("prepare")
    total = experiment_steps(baseline)
    # In the middle of an epoch, near its end, as a terminal closes, and in the last epoch with a signal to one rank only.
    stops = [(2, total // 8, signal.SIGTERM), (3, total // 2, signal.SIGINT), (2, total * 5 // 8, signal.SIGHUP), (1, total - 40, None)]
    for world_size, step, number in stops:
        # Who owns which lanes may be another at each start.
        values = LONGER | {"dist__world_size": world_size, "dist__batch_size_per_gpu": 96 // world_size, "dist__lanes_per_rank": "auto"}
        process = experiment.set(**values).start("train")
        wait_for_step(experiment, step, process)
        assert status(experiment)["process"] == f"{process.pid} on {socket.gethostname()}"
        children = psutil.Process(process.pid).children(recursive=True)
        with suspended(process) as ranks:
            # Before the ranks go on: the training is not to end by itself.
            (process if number else ranks[0]).send_signal(number or signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 75, said
        assert "stopped on request" in said
        assert not psutil.wait_procs(children, timeout=5)[1]
        ended = status(experiment)
        assert (ended["outcome"], ended["exit_code"], ended["process"]) == ("stopped", 75, None)
        assert step <= ended["step"] < total
        assert Path(ended["checkpoint"]).name == f"step-{ended['step']:08d}.safetensors"
        assert [run.info.status for run in mlflow_runs(experiment)] == ["KILLED"]
    resumed_under_nohup(experiment)
    assert weights(experiment) == weights(baseline)
    (run,) = mlflow_runs(experiment)
    assert run.info.status == "FINISHED"
    shared = [line["per_rank"] for line in experiment.journal("lanes")]
    assert [len(one) for one in shared] == [2, 3, 2, 1, 2]
    assert [sum(one) for one in shared] == [4] * 5
    assert experiment.json("models/receipt.json")["placement"]["lanes_per_rank"] == shared[-1]
    assert run.data.tags["lockstep.lanes_per_rank"] == str(shared[-1])
    same_figures(experiment, baseline)


def resumed_under_nohup(experiment: Experiment) -> None:
    """Train to the end on two ranks, whatever the terminal does."""
    params = experiment.set(**LONGER, dist__lanes_per_rank="auto").params
    command = ["nohup", sys.executable, "-m", "pipeline", "train", "--params", str(params)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, env=clean_environment(), text=True, **pipes)
    until(lambda: len(ranks_of(process)) == 2, process)
    process.send_signal(signal.SIGHUP)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said


def test_a_killed_rank_costs_a_restart_and_not_one_bit(baseline: Experiment, experiment: Experiment) -> None:
    """Under the other strategies: tests/faults/test_strategy_faults.py."""
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, experiment_steps(baseline) * 3 // 8, process)
    victim = ranks_of(process)[1]
    os.kill(victim.pid, signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "rank 1 was ended by SIGKILL in step " in said
    assert weights(experiment) == weights(baseline)
    same_figures(experiment, baseline)
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]


def test_a_killed_launcher_leaves_no_orphan_and_the_next_start_goes_on(baseline: Experiment, experiment: Experiment) -> None:
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, experiment_steps(baseline) // 2, process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=30)
    # At once: its ranks are still saving, and its mirror is still sending.
    assert "To catch up" not in experiment.run("train")
    assert not psutil.wait_procs(children, timeout=1)[1]
    assert weights(experiment) == weights(baseline)
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]
    same_figures(experiment, baseline)


@pytest.mark.fault(27, "SIGKILL of train between its receipt and its outs")
def test_a_launcher_killed_while_it_publishes_leaves_nothing_out_for_good(baseline: Experiment, experiment: Experiment) -> None:
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    until(lambda: list((experiment.folder / "runs").glob("*/receipt.json")), process, every_seconds=0.001)
    process.kill()
    process.communicate(timeout=30)
    assert "finished already" not in experiment.run("train")
    same_figures(experiment, baseline)
    (run,) = mlflow_runs(experiment)
    assert run.info.status == "FINISHED"
    assert run.data.tags["lockstep.weights_sha256"] == weights(experiment)
    assert "best/validation_accuracy" in run.data.metrics
    assert "finished already" in experiment.run("train")


@pytest.mark.parametrize(("numbers", "code"), [((signal.SIGTERM, signal.SIGINT), 130), ((signal.SIGINT, signal.SIGTERM), 143)])
def test_a_second_signal_ends_it_at_once(experiment: Experiment, numbers: tuple[signal.Signals, signal.Signals], code: int) -> None:
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 10, process)
    children = psutil.Process(process.pid).children(recursive=True)
    with suspended(process) as ranks:
        signal_twice(process, *numbers, ranks)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == code, said
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.fault(29, "SIGTERM, SIGINT, SIGTERM and SIGHUP to train within a second")
def test_a_storm_of_signals_is_one_request(experiment: Experiment) -> None:
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 10, process)
    children = psutil.Process(process.pid).children(recursive=True)
    with suspended(process):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
            time.sleep(0.2)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert Path(status(experiment)["checkpoint"]).name == f"step-{status(experiment)['step']:08d}.safetensors"
    assert not psutil.wait_procs(children, timeout=5)[1]


def test_the_same_experiment_on_another_placement_is_recognised_in_seconds(baseline: Experiment, tmp_path: Path) -> None:
    copy = Experiment(tmp_path / "copy")
    shutil.copytree(baseline.folder, copy.folder)
    logs = list(copy.run_folder.glob("logs/*"))
    copy.set(**LONGER, dist__world_size=4, dist__batch_size_per_gpu=24)
    before = child_cpu_seconds()
    subprocess.run([sys.executable, "-c", "import mlflow.store.tracking.sqlalchemy_store"], check=True)
    importing, before = child_cpu_seconds() - before, child_cpu_seconds()
    said = copy.run("train")
    # MLflow is asked by a process that imports it; a rank costs as much again, and so does an agent.
    assert child_cpu_seconds() - before < 3 * importing
    assert "finished already, published again" in said
    assert "trained before, last with world size 2\n" in said
    assert f"SHA-256 of the weights after the last step: {weights(baseline)}\n" in said
    assert list(copy.run_folder.glob("logs/*")) == logs, "ranks were started"
    assert (copy.folder / "models/receipt.json").read_bytes() == (baseline.folder / "models/receipt.json").read_bytes()
    assert len(mlflow_runs(copy)) == 1


@pytest.mark.fault(20, "a second start beside the first")
def test_two_trainings_of_one_experiment_do_not_run_at_once(experiment: Experiment) -> None:
    experiment.set(**LONGER).run("prepare")
    first = experiment.start("train")
    wait_for_step(experiment, 1, first)
    with suspended(first):
        # What is left of the machine is the second one's: two seconds are two seconds of work.
        before, started_at = child_cpu_seconds(), time.monotonic()
        said = experiment.run("train", expect=4)
        assert child_cpu_seconds() - before < 2
        assert time.monotonic() - started_at < 10, "it waited"
    assert f"process {first.pid}" in said
    first.terminate()
    first.communicate(timeout=60)


@pytest.mark.fault(15, "a learning rate of 1e30, every step saved")
def test_divergence_ends_with_5_and_is_not_kept(experiment: Experiment) -> None:
    experiment.set(train__learning_rate=1e30, train__warmup_epochs=0, train__momentum=0.0, model__name="mlp", checkpoint__every_steps=1)
    experiment.run("prepare")
    said = experiment.run("train", expect=5)
    assert "training diverged" in said
    assert status(experiment)["outcome"] == "diverged"
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FAILED"]
    kept = sorted((experiment.run_folder / "checkpoints").glob("step-*.safetensors"))
    assert kept, "nothing was saved before it diverged, so nothing is shown"
    for path in kept:
        assert all(value.isfinite().all() for value in load_file(path).values())


@pytest.mark.fault(12, "a prepared file one byte short")
def test_damaged_data_end_with_3_before_any_rank_starts(experiment: Experiment) -> None:
    cure = f"run: python -m pipeline prepare --params {experiment.params}"
    assert cure in experiment.run("train", expect=3)
    experiment.run("prepare")
    path = experiment.folder / "data/prepared/validation-labels.npy"
    path.write_bytes(path.read_bytes()[:-1])
    said = experiment.run("train", expect=3)
    assert str(path) in said
    assert "expected SHA-256" in said
    assert not list((experiment.folder / "runs").glob("*/logs/*/torchrun.log"))
