"""Ctrl-C in every stage, once and twice."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest

from tests.kit.experiment import LONGER, Experiment
from tests.kit.trainings import mlflow_runs, ranks_of, same_figures, signal_twice, suspended, wait_for_step
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]


def interrupted(process: subprocess.Popen[str], times: int, module: str | None = None) -> int:
    """The exit code after one or two SIGINTs; ranks are stopped meanwhile, so that none finishes before the second."""
    with suspended(process, module) if module else contextlib.nullcontext([]) as ranks:
        if times == 2 and ranks:
            signal_twice(process, signal.SIGINT, signal.SIGINT, ranks)
            # Before they go on: they would end by the first.
            process.wait(timeout=60)
        else:
            process.send_signal(signal.SIGINT)
    if times == 2 and not ranks:
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.fault(4, "SIGINT to prepare while it writes, to train in mid-epoch, to evaluate as its ranks begin: once each; twice each")
def test_an_interrupted_stage_leaves_nothing_half_written_and_can_be_run_again(
    baseline: Experiment, experiment: Experiment, times: int, record_property: Note
) -> None:
    # So much that there is time to interrupt it.
    process = experiment.set(data__name="synthetic:60000").start("prepare")
    until(lambda: list((experiment.folder / "data").glob(".prepared-*/*")), process, every_seconds=0.001)
    codes = [interrupted(process, times)]
    assert [path for path in (experiment.folder / "data").rglob("*") if path.is_file()] == []
    experiment.set(**LONGER).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 60, process)
    children = psutil.Process(process.pid).children(recursive=True)
    codes.append(interrupted(process, times, "train_rank"))
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert not (experiment.folder / "models").exists()
    experiment.run("train")
    same_figures(experiment, baseline)
    process = experiment.start("evaluate")
    # Before both are there the agent may end at once.
    until(lambda: len(ranks_of(process, "evaluate_rank")) == 2, process)
    codes.append(interrupted(process, times, "evaluate_rank"))
    assert not (experiment.folder / "metrics" / "eval.json").exists()
    experiment.run("evaluate")
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]
    assert codes == ([130, 75, 75] if times == 1 else [130, 130, 130])
    record_property("happened", f"exit codes {codes}; nothing half-written; each ran again, bit-equal")


@pytest.mark.fault(4, "SIGINT to prepare, every 3 ms until it has ended")
def test_any_number_of_interrupts_ends_prepare_once(experiment: Experiment, record_property: Note) -> None:
    process = experiment.set(data__name="synthetic:60000").start("prepare")
    until(lambda: list((experiment.folder / "data").glob(".prepared-*/*")), process, every_seconds=0.001)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.003)
    said = process.communicate()[0]
    assert process.returncode == 130, said
    assert said.strip().splitlines() == ["stopped; nothing half-written is left"]
    assert [path for path in (experiment.folder / "data").rglob("*") if path.is_file()] == []
    record_property("happened", "exit 130 with one line; nothing half-written")
