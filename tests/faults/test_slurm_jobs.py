"""`deploy/slurm.sh` on a real Slurm of four nodes: several nodes, time limits, requeues, lost nodes end in the bits of one machine."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.test_slurm_faults import sh
from tests.kit.engines import AUTO
from tests.kit.experiment import LONGER, ROOT, Experiment
from tests.kit.trainings import same_figures, status, wait_for_step
from tests.kit.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
Note = Callable[[str, object], None]
# So seldom that only a stop saves.
SELDOM = LONGER | {"checkpoint__every_steps": 100_000}
# Where the cluster's daemons keep their pids.
NODES = Path("/run/slurm-cluster")


class Job:
    """The script in the queue, for one experiment."""

    def __init__(self, experiment: Experiment, *options: str):
        self.experiment, self.log = experiment, experiment.folder / "job.log"
        params = ("--params", str(experiment.params))
        where = (f"--output={self.log}", "--cpus-per-task=1", "--time=10")
        words = (*params, "python", "-m", "pipeline", "train", *params)
        self.number = sh("sbatch", "--parsable", *where, *options, str(ROOT / "deploy" / "slurm.sh"), *words)

    def fact(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", sh("scontrol", "show", "job", self.number))
        assert found is not None
        return found[1]

    def wait(self, *states: str, seconds: float = 240) -> str:
        until(lambda: self.fact("JobState") in states, seconds=seconds, every_seconds=0.5)
        return self.log.read_text() if self.log.exists() else ""

    def comes_again(self) -> None:
        """It was requeued: Slurm holds such a job back for two minutes, and need not here."""
        until(lambda: self.fact("Restarts") == "1", seconds=200, every_seconds=0.5)
        until(lambda: self.fact("Reason") == "BeginTime", seconds=60, every_seconds=0.5)
        # A node refuses what begins in the second in which it has ended the job: that is what Slurm waits for.
        until(lambda: not sh("squeue", "--noheader", "--states=COMPLETING"), seconds=60, every_seconds=0.5)
        time.sleep(3)
        sh("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def nodes(self) -> set[str]:
        return set(sh("scontrol", "show", "hostnames", self.fact("NodeList")).split())

    def reaches(self, step: int) -> None:
        until(lambda: list(self.experiment.folder.glob("runs/*/journal.jsonl")), seconds=120)
        wait_for_step(self.experiment, step)


@pytest.fixture
def submit() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def one(experiment: Experiment, *options: str) -> Job:
        jobs.append(Job(experiment, *options))
        return jobs[-1]

    yield one
    for job in jobs:
        subprocess.run(["scancel", job.number], capture_output=True)
        job.wait("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module", autouse=True)
def four_nodes() -> None:
    if int(sh("sinfo", "--noheader", "--format=%D").split()[0]) < 4:
        pytest.skip("no Slurm here")


@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_of_a_job_train_to_the_bits_of_one_machine(
    baseline: Experiment, experiment: Experiment, submit: Callable[..., Job], nodes: int
) -> None:
    experiment.set(**LONGER, dist__world_size=nodes, dist__batch_size_per_gpu=96 // nodes).run("prepare")
    job = submit(experiment, f"--nodes={nodes}")
    said = job.wait("COMPLETED", "FAILED")
    assert job.fact("JobState") == "COMPLETED", said
    assert len(job.nodes()) == nodes
    assert f"leading {nodes - 1} worker" in said
    same_figures(experiment, baseline)


@pytest.mark.fault(29, "`scancel` of a real Slurm job of two nodes")
def test_a_cancelled_job_has_saved_and_stays_cancelled(
    baseline: Experiment, experiment: Experiment, submit: Callable[..., Job], record_property: Note
) -> None:
    experiment.set(**SELDOM).run("prepare")
    job = submit(experiment)
    job.reaches(30)
    sh("scancel", job.number)
    said = job.wait("CANCELLED", "PENDING", "REQUEUED")
    assert job.fact("JobState") == "CANCELLED", said
    until(lambda: status(experiment)["outcome"] != "running")
    ended = status(experiment)
    assert (ended["outcome"], ended["exit_code"]) == ("stopped", 75), said
    assert ended["step"] == int(Path(ended["checkpoint"]).stem[-8:]) >= 30
    experiment.set(**LONGER).run("train")
    same_figures(experiment, baseline)
    record_property("happened", f"75 at step {ended['step']}, saved; the job stays cancelled; bit-equal when it went on")


@pytest.mark.fault(29, "the time limit of a real Slurm job of two nodes, which requeues itself")
def test_a_job_saves_before_its_time_limit_and_goes_on_by_itself(
    experiment: Experiment, submit: Callable[..., Job], record_property: Note
) -> None:
    # Longer than a limit of two minutes, as Slurm may send the signal a minute early.
    experiment.set(**SELDOM | {"train__epochs": 400}).run("prepare")
    job = submit(experiment, "--time=2", "--signal=TERM@30")
    until(lambda: job.fact("Restarts") == "1", seconds=200, every_seconds=0.5)
    saved = status(experiment)
    step = saved["step"]
    assert (saved["exit_code"], step > 30) == (75, True)
    job.comes_again()
    until(lambda: len(experiment.journal("started")) == 2, seconds=200)
    assert f"going on from {saved['checkpoint']}" in job.log.read_text()
    # Which it says after it has said so in the journal.
    until(lambda: status(experiment)["outcome"] == "running", seconds=60)
    record_property("happened", f"75 at step {step}, saved; requeued, and went on from it")


@pytest.mark.fault(29, "`scontrol requeue` in the middle; then other nodes, and twice as many")
def test_a_requeued_job_goes_on_and_another_on_more_nodes_ends_it(
    baseline: Experiment, experiment: Experiment, submit: Callable[..., Job], record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    job = submit(experiment)
    job.reaches(40)
    sh("scontrol", "requeue", job.number)
    job.comes_again()
    until(lambda: len(experiment.journal("started")) == 2, seconds=200)
    sh("scancel", job.number)
    job.wait("CANCELLED")
    until(lambda: status(experiment)["outcome"] != "running")
    experiment.set(**LONGER, dist__world_size=4, dist__batch_size_per_gpu=24)
    more = submit(experiment, "--nodes=4")
    said = more.wait("COMPLETED", "FAILED")
    assert more.fact("JobState") == "COMPLETED", said
    same_figures(experiment, baseline)
    record_property("happened", "requeued and went on; on four nodes it ended, bit-equal")


def processes_on(node: str, job: str) -> Iterator[psutil.Process]:
    """A job's processes on one of the nodes, which here are one machine."""
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            told = one.environ()
            if (told.get("SLURMD_NODENAME"), told.get("SLURM_JOB_ID")) == (node, job):
                yield one


def daemon(*words: str) -> str:
    """Start what outlives this test; returns its pid."""
    return sh("sh", "-c", f"setsid nohup {' '.join(words)} </dev/null >/dev/null 2>&1 & echo $!") + "\n"


@contextlib.contextmanager
def lost(node: str, job: str) -> Iterator[None]:
    """A node whose processes all end at once; afterwards it is there again."""
    mine = list(processes_on(node, job))
    steps = {one.parent() for one in mine}
    os.kill(int((NODES / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
    for one in (*(step for step in steps if step is not None and step.name().startswith("slurmstepd")), *mine):
        with contextlib.suppress(psutil.Error):
            one.kill()
    try:
        yield
    finally:
        (NODES / f"slurmd-{node}.pid").write_text(daemon("slurmd", "-D", "-N", node))
        until(lambda: "idle" in sh("sinfo", "--noheader", f"--nodes={node}", "--format=%t"), seconds=120)


@pytest.mark.fault(36, "a slurmd killed with all its processes in mid-run; Slurm begins the job again on the other nodes")
@pytest.mark.parametrize(("nodes", "ranks"), [("2", ["2", "2"]), ("2-4", ["4", "3"])])
def test_a_lost_node_is_replaced_or_done_without(
    baseline: Experiment, experiment: Experiment, submit: Callable[..., Job], nodes: str, ranks: list[str]
) -> None:
    experiment.set(**AUTO).run("prepare")
    job = submit(experiment, f"--nodes={nodes}")
    job.reaches(40)
    node = sorted(job.nodes())[-1]
    with lost(node, job.number):
        job.comes_again()
        said = job.wait("COMPLETED", "FAILED", seconds=300)
        assert job.fact("JobState") == "COMPLETED", said
        assert node not in job.nodes()
    assert [line["tags"]["lockstep.world_size"] for line in experiment.journal("started")] == ranks
    same_figures(experiment, baseline)


def test_two_jobs_run_at_once(baseline: Experiment, tmp_path: Path, submit: Callable[..., Job]) -> None:
    jobs: list[Job] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        experiment = Experiment(tmp_path / name).set(**LONGER)
        experiment.run("prepare")
        jobs.append(submit(experiment))
    until(lambda: [job.fact("JobState") for job in jobs] == ["RUNNING"] * 2)
    for job in jobs:
        said = job.wait("COMPLETED", "FAILED")
        assert job.fact("JobState") == "COMPLETED", said
        same_figures(job.experiment, baseline)
