"""`deploy/ray_job.py` on a real Ray of three raylets: runs, lost machines and stopped jobs end in the bits of one machine."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kit.engines import AUTO, SELDOM, engine
from tests.kit.experiment import LONGER, ROOT, Experiment, clean_environment
from tests.kit.skips import NO_RAY
from tests.kit.trainings import same_figures, status, wait_for_step
from tests.kit.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.engine]
DRIVER = ROOT / "deploy" / "ray_job.py"
Note = Callable[[str, object], None]


class Ray:
    """Three machines of Ray on this one."""

    def __init__(self, programs: Path, said: dict[str, Any]):
        self._programs, self.dashboard, self.raylets = programs, f"http://{said['dashboard']}", said["raylets"]
        self._environment = clean_environment() | {"RAY_ADDRESS": said["address"]}
        self._jobs = self._environment | {"RAY_ADDRESS": self.dashboard}

    def drive(self, *words: str) -> "subprocess.Popen[str]":
        """The driver, started by hand."""
        command = [str(self._programs / "python"), str(DRIVER), *words]
        return subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def submit(self, *words: str, **variables: str) -> str:
        """The driver as a job of Ray; returns its number."""
        environment = json.dumps({"env_vars": variables})
        words = ("--runtime-env-json", environment, "--", str(self._programs / "python"), str(DRIVER), *words)
        # Ray's agents, which start jobs, take some seconds more than Ray itself.
        said = until(lambda: self._ray("submit", "--no-wait", *words, but="No available agent"), seconds=60, every_seconds=1)
        return said.split("Job '")[1].split("'")[0]

    def stop(self, job: str) -> None:
        self._ray("stop", job)

    def fact(self, job: str, name: str = "") -> Any:
        with urllib.request.urlopen(f"{self.dashboard}/api/jobs/{job}{name}", timeout=30) as answer:
            return json.load(answer)

    def _ray(self, *words: str, but: str = "never") -> str:
        done = subprocess.run([str(self._programs / "ray"), "job", *words], env=self._jobs, capture_output=True, text=True)
        assert done.returncode == 0 or but in done.stderr, done.stdout + done.stderr
        return "" if done.returncode else done.stdout


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    programs = engine("ray", NO_RAY)
    reads, writes = os.pipe()
    script = f'exec "$0" tests/kit/ray_cluster.py 3 3>&{writes}'
    cluster = subprocess.Popen(
        ["bash", "-c", script, str(programs / "python")],
        cwd=ROOT,
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[writes],
    )
    os.close(writes)
    with os.fdopen(reads) as said:
        yield Ray(programs, json.loads(said.readline()))
    cluster.communicate(timeout=60)


def training(experiment: Experiment, nodes: str) -> list[str]:
    """What the driver is told: one rank a machine, as these are one machine."""
    train = [sys.executable, "-m", "pipeline", "train", "--params", str(experiment.params)]
    lead = ["env", "PET_NPROC_PER_NODE=1", sys.executable, "-m", "pipeline", "lead", "--params", str(experiment.params)]
    return ["--nodes", nodes, "--folder", str(ROOT), "--", *lead, *train]


def sizes(experiment: Experiment) -> list[str]:
    """The world size of every start."""
    return [line["tags"]["lockstep.world_size"] for line in experiment.journal("started") if line["stage"] == "train"]


@pytest.mark.parametrize(
    ("command", "code", "starts"),
    [("exit $((PET_NODE_RANK + 3))", 3, 1), ("exit $((PET_NODE_RANK ? 0 : 75))", 75, 1), ("exit 6", 6, 2), ("kill -KILL $$", 137, 2)],
)
def test_the_driver_ends_with_the_leaders_code_and_begins_again_after_a_loss_alone(ray: Ray, command: str, code: int, starts: int) -> None:
    driver = ray.drive("--nodes", "2", "--starts", "2", "--", "sh", "-c", command)
    said, _ = driver.communicate(timeout=60)
    assert (driver.returncode, said.count("on 2 machines")) == (code, starts), said


def stopped(ray: Ray, experiment: Experiment, seconds: str) -> str:
    """Stop a job in mid-training that has so long for it; returns what it said, once nothing of it runs."""
    job = ray.submit(*training(experiment, "2"), RAY_JOB_STOP_WAIT_TIME_S=seconds)
    wait_for_step(experiment, 50)
    ray.stop(job)
    assert ray.fact(job)["status"] == "STOPPED"
    said = ray.fact(job, "/logs")["logs"]
    until(lambda: not [one for one in psutil.process_iter() if str(experiment.params) in words_of(one)], seconds=90, every_seconds=0.2)
    return said


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.fault(29, "`ray job stop` of two machines, with 60 s for it; then submitted again")
def test_a_command_that_cannot_start_is_4_and_one_line(ray: Ray) -> None:
    driver = ray.drive("--nodes", "2", "--folder", "/nowhere", "--", "true")
    said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 4, said
    assert "the command cannot be started on a machine: " in said and "see --folder" in said


def test_a_stopped_job_ends_with_75_and_submitted_again_in_the_bits_of_one_machine(
    ray: Ray, baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    experiment.set(**SELDOM).run("prepare")
    said = stopped(ray, experiment, "60")
    ended = status(experiment)
    assert (ended["outcome"], ended["exit_code"]) == ("stopped", 75), said
    assert ended["step"] == int(Path(ended["checkpoint"]).stem[-8:]) >= 50
    assert "start 1: ended with 75\n" in said
    job = ray.submit(*training(experiment.set(**AUTO), "2"))
    until(lambda: ray.fact(job)["status"] not in ("PENDING", "RUNNING"), seconds=120, every_seconds=0.2)
    said = ray.fact(job, "/logs")["logs"]
    assert (ray.fact(job)["status"], ray.fact(job)["driver_exit_code"]) == ("SUCCEEDED", 0), said
    assert f"going on from {ended['checkpoint']}" in said
    assert sizes(experiment) == ["2", "2"]
    same_figures(experiment, baseline)
    record_property("happened", f"75 at step {ended['step']}, saved; submitted again it ended, bit-equal")


@pytest.mark.fault(29, "`ray job stop` of two machines, with the 3 s that Ray gives by itself")
def test_a_stopped_job_without_time_enough_goes_on_from_a_whole_checkpoint(
    ray: Ray, baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    experiment.set(**AUTO).run("prepare")
    stopped(ray, experiment, "3")
    newest = max(experiment.folder.glob("runs/*/checkpoints/*.safetensors"))
    assert f"going on from {newest}" in experiment.set(**LONGER).run("train")
    same_figures(experiment, baseline)
    record_property("happened", f"went on from {newest.name}; bit-equal")


@pytest.mark.fault(36, "a machine of Ray killed with all its processes in mid-run")
def test_a_lost_machine_costs_a_start_with_fewer_and_no_bit(
    ray: Ray, baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    experiment.set(**AUTO).run("prepare")
    driver = ray.drive(*training(experiment, "1:3"))
    wait_for_step(experiment, 50, driver)
    # The last raylet; the leader is on another one, or is lost as well: both are to go on.
    lost = psutil.Process(ray.raylets[-1])
    for one in [lost, *lost.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    said, _ = driver.communicate(timeout=200)
    assert driver.returncode == 0, said
    assert "start 1: on 3 machines" in said
    # Ray's own lines may come between, and a start that finds out that Ray has not yet missed the machine.
    assert said.index("a machine was lost") < said.rindex(": on 2 machines"), said
    assert sizes(experiment) == ["3", "2"]
    same_figures(experiment, baseline)
    record_property("happened", "begun again on two machines; the bits of one")
