"""`deploy/slurm.sh` under the rules of a site: preemption by another partition, requeues by exit code, arrays of experiments."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.test_slurm_faults import sh
from tests.faults.test_slurm_jobs import NODES, SELDOM, Job, daemon, four_nodes, submit
from tests.kit.checkout import clone_of
from tests.kit.experiment import ROOT, Experiment, clean_environment, settings
from tests.kit.trainings import same_figures, status
from tests.kit.waiting import until

__all__ = ["four_nodes", "submit"]
pytestmark = [pytest.mark.slow, pytest.mark.slurm]
CONF = Path("/etc/slurm/slurm.conf")
# A partition whose jobs take the nodes of the others', after a grace.
PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=n[1-4] MaxTime=INFINITE State=UP PriorityTier=10
"""


def restart_controller() -> None:
    pid = int((NODES / "ctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{pid}").exists(), seconds=30)
    (NODES / "ctld.pid").write_text(daemon("slurmctld", "-D"))
    until(lambda: subprocess.run(["scontrol", "ping"], capture_output=True, text=True).stdout.count("UP"), seconds=30)
    until(lambda: "idle" in sh("sinfo", "--noheader", "--format=%t"), seconds=60, every_seconds=0.5)


@contextlib.contextmanager
def site(lines: str, of_all: str = "") -> Iterator[None]:
    """Slurm with other rules, those of its partition too, and afterwards as before."""
    before = CONF.read_text()
    CONF.write_text(before.replace("PartitionName=all", f"PartitionName=all {of_all}") + lines)
    try:
        restart_controller()
        yield
    finally:
        CONF.write_text(before)
        restart_controller()


@pytest.mark.fault(29, "preemption by a job of another partition, with a GraceTime of 20 s")
def test_a_preempted_job_saves_and_goes_on_when_the_other_has_ended(
    baseline: Experiment, experiment: Experiment, submit: Callable[..., Job], record_property: Callable[[str, object], None]
) -> None:
    with site(PREEMPTION, "PriorityTier=1 GraceTime=20"):
        experiment.set(**SELDOM).run("prepare")
        job = submit(experiment)
        job.reaches(30)
        other = sh("sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive", "--wrap=sleep 5")
        until(lambda: status(experiment)["outcome"] != "running", seconds=60)
        saved = status(experiment)
        assert (saved["outcome"], saved["exit_code"]) == ("stopped", 75)
        assert saved["step"] == int(Path(saved["checkpoint"]).stem[-8:]) >= 30
        job.comes_again()
        said = job.wait("COMPLETED", "FAILED")
        assert job.fact("JobState") == "COMPLETED", said
        assert f"going on from {saved['checkpoint']}" in said
        subprocess.run(["scancel", other], capture_output=True)
    same_figures(experiment, baseline)
    record_property("happened", f"75 at step {saved['step']}, saved; requeued, and bit-equal")


def test_a_site_that_requeues_by_exit_code_needs_no_line_of_the_script(
    baseline: Experiment, experiment: Experiment, submit: Callable[..., Job]
) -> None:
    with site("RequeueExit=75\n"):
        experiment.set(**SELDOM).run("prepare")
        # So the script leaves it to the site.
        job = submit(experiment, "--export=ALL,MAX_REQUEUES=0")
        job.reaches(30)
        sh("scancel", "--signal=TERM", job.number)
        job.comes_again()
        said = job.wait("COMPLETED", "FAILED")
        assert job.fact("JobState") == "COMPLETED", said
        assert "going on from" in said
    same_figures(experiment, baseline)


class Array:
    """A clone of the last commit, and an array of two experiments in it."""

    def __init__(self, folder: Path, **more: object):
        self.tree, self._folder = clone_of(folder / "tree"), folder
        (self.tree / ".venv").symlink_to(ROOT / ".venv")
        # What params.yaml says otherwise, in every experiment alike.
        small = settings(model__name="mlp", tracking__experiment="array", **more)
        changes = " ".join(f"-S={name}.{key}={value}" for name, values in small.items() for key, value in values.items())
        lines = ("-S seed=7", "-S seed=8 -S train.learning_rate=0.02")
        (self.tree / "lines").write_text("".join(f"{changes} {line}\n" for line in lines))

    def submit(self, *options: str) -> "subprocess.CompletedProcess[str]":
        words = ["sbatch", "--parsable", "--array=1-2", "--nodes=1", *options, f"--output={self._folder}/%a.log", "deploy/slurm.sh"]
        return subprocess.run(words, cwd=self.tree, env=clean_environment() | {"EXPERIMENTS": "lines"}, capture_output=True, text=True)

    def logs(self) -> dict[int, str]:
        return {number: (self._folder / f"{number}.log").read_text() for number in (1, 2)}


def test_every_line_of_a_file_is_an_experiment_in_a_checkout_of_its_own(tmp_path: Path) -> None:
    array = Array(tmp_path)
    tree, done = array.tree, array.submit("--wait")
    logs = array.logs()
    assert done.returncode == 0, logs
    trees = [Path(f"{tree}-{done.stdout.strip()}-{number}") for number in (1, 2)]
    results = [list(one.glob("runs/*/receipt.json")) for one in trees]
    assert [len(found) for found in results] == [1, 1], logs
    # One cache, and one history of experiments.
    assert not list((trees[0] / ".dvc" / "cache").glob("files/md5/*"))
    shown = subprocess.run(["dvc", "exp", "list"], cwd=tree, capture_output=True, text=True, check=True)
    assert len([line for line in shown.stdout.splitlines() if "[" in line]) == 2, shown.stdout


def test_of_an_array_the_task_alone_that_was_stopped_is_requeued(tmp_path: Path) -> None:
    array = Array(tmp_path, data__name="synthetic:6000", train__epochs=60)
    number = array.submit().stdout.strip()
    until(
        lambda: sum("epoch 1/" in said for said in array.logs().values()) == 2 if len(list(tmp_path.glob("*.log"))) == 2 else False,
        seconds=180,
    )
    # One of them has the number of the whole array.
    tasks = dict(line.split() for line in sh("squeue", f"--jobs={number}", "--noheader", "--format=%A %K").splitlines())
    stopped = tasks[number]
    sh("scancel", "--signal=TERM", f"{number}_{stopped}")
    until(lambda: fact(number, stopped, "Restarts") == "1", seconds=120)
    until(lambda: all(fact(number, task, "JobState") == "COMPLETED" for task in tasks.values()), seconds=300)
    assert [fact(number, task, "Restarts") for task in (stopped, *(set(tasks.values()) - {stopped}))] == ["1", "0"], array.logs()
    assert "going on from" in array.logs()[int(stopped)]


def fact(number: str, task: str, name: str) -> str:
    """What Slurm says of one task of an array."""
    return sh("scontrol", "show", "job", f"{number}_{task}").split(f"{name}=")[1].split()[0]
