"""Machines that are lost, leave and come while the others go on, each a shell of its own."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.faults.elastic import lost_steps
from tests.faults.test_elastic_faults import wait_for_ranks
from tests.kit.experiment import PACED, PACED_MODEL, Experiment
from tests.kit.leading import Job, end
from tests.kit.trainings import mlflow_runs, ranks_of, same_figures, starting_no_rank, status, wait_for_step
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]
# Four ranks on two machines.
MACHINES = PACED | {"dist__world_size": 4, "dist__nodes": 2, "dist__elastic": True}


def processes_of(machine: subprocess.Popen[str]) -> list[psutil.Process]:
    return [psutil.Process(machine.pid), *psutil.Process(machine.pid).children(recursive=True)]


def lose(machine: subprocess.Popen[str]) -> None:
    """Kill all processes of a machine at once: nobody is left to tell."""
    processes = processes_of(machine)
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.suspend()
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def both_stages(experiment: Experiment) -> tuple[str, ...]:
    stages = [f"{sys.executable} -m pipeline {stage} --params {experiment.params}" for stage in ("train", "evaluate")]
    return "sh", "-c", " && ".join(stages)


def killed_ranks_come_back(leading: Experiment, leader: subprocess.Popen[str], worker: subprocess.Popen[str]) -> None:
    """The rank that writes, and one of the other machine's, each by itself."""
    before, there = ranks_of(leader), ranks_of(worker)
    for machine, rank in ((leader, before[0]), (worker, there[1])):
        with starting_no_rank(machine):
            rank.kill()
            wait_for_ranks(leading, 3)
        wait_for_ranks(leading, 4)
    assert (ranks_of(leader)[1:], ranks_of(worker)[:1]) == (before[1:], there[:1])


@pytest.mark.fault(36, "of two elastic machines SIGKILL of a rank on each, loss of one, SIGTERM of its replacement; others come")
def test_machines_come_and_go_and_the_bits_stay(paced: Experiment, tmp_path: Path, record_property: Note) -> None:
    job = Job(tmp_path, model=PACED_MODEL, **MACHINES)
    slow = tmp_path / "slow"
    slow.touch()
    leading = job.leading
    leader, worker = job.lead(*both_stages(leading), SLOW_FILE=str(slow)), job.join(SLOW_FILE=str(slow))
    wait_for_step(leading, 30, leader)
    killed_ranks_come_back(leading, leader, worker)
    survivor = ranks_of(leader)[1]

    lose(worker)
    end(worker)
    lost_at = time.monotonic()
    wait_for_ranks(leading, 2)
    seconds = time.monotonic() - lost_at
    second = job.join(SLOW_FILE=str(slow))
    wait_for_ranks(leading, 4)
    second.send_signal(signal.SIGTERM)
    code, said = end(second)
    assert (code, said.splitlines()[-1]) == (75, "left on request"), said
    wait_for_ranks(leading, 2)
    third = job.join(SLOW_FILE=str(slow))
    wait_for_ranks(leading, 4)
    assert ranks_of(leader)[1] == survivor
    lose(third)
    end(third)
    wait_for_ranks(leading, 2)
    slow.unlink()
    code, said = end(leader)
    assert code == 0, said
    assert "1 of 2 machines are there; the others are not waited for" in said
    assert leading.json("metrics/eval.json") == paced.json("metrics/eval.json")
    assert not lost_steps(leading)
    same_figures(leading, paced)
    assert [run.info.status for run in mlflow_runs(leading)] == ["FINISHED"]
    groups = [line["ranks"] for line in leading.journal("ranks")]
    record_property("happened", f"no step lost, bit-equal, groups of {groups} ranks; {seconds:.1f} s from the loss of a machine")


@pytest.mark.fault(37, "two elastic machines: the leader's ranks are lost; the other is silent (SIGSTOP); SIGTERM of both at once")
def test_the_leader_may_lose_its_ranks_and_the_other_machine_may_be_silent(
    paced: Experiment, tmp_path: Path, record_property: Note
) -> None:
    job = Job(tmp_path, model=PACED_MODEL, **MACHINES)
    slow = tmp_path / "slow"
    slow.touch()
    leading, leader, worker = job.leading, job.lead(SLOW_FILE=str(slow)), job.join(SLOW_FILE=str(slow))
    wait_for_step(leading, 30, leader)
    there = ranks_of(worker)
    for one in ranks_of(leader):
        one.kill()
    until(lambda: len(leading.journal("ranks")) >= 2, leader)
    wait_for_ranks(leading, 4)
    assert ranks_of(worker) == there
    assert not lost_steps(leading)

    silent = processes_of(worker)
    for one in silent:
        one.suspend()
    silent_at = time.monotonic()
    wait_for_ranks(leading, 2)
    seconds = time.monotonic() - silent_at
    for one in silent:
        one.resume()
    wait_for_ranks(leading, 4)
    assert not lost_steps(leading)

    for one in (leader, worker):
        one.send_signal(signal.SIGTERM)
    (code, said), (of_worker, _) = end(leader), end(worker)
    assert (code, of_worker) == (75, 75), said
    stopped = status(leading)
    assert (stopped["outcome"], stopped["step"]) == ("stopped", int(Path(stopped["checkpoint"]).stem[-8:]))
    slow.unlink()
    leading.set(**PACED).run("train")
    same_figures(leading, paced)
    record_property("happened", f"no step lost, {seconds:.1f} s without a silent machine; stopped at step {stopped['step']}, bit-equal")
