"""How SkyPilot and dstack stop a job, done to real trainings: both leave time enough to save."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.engines import SELDOM, engine
from tests.kit.experiment import LONGER, ROOT, Experiment, clean_environment
from tests.kit.skips import NO_SKYPILOT
from tests.kit.trainings import same_figures, status, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.engine]
Note = Callable[[str, object], None]
# What SkyPilot leaves beside a job: it waits for the first process to end, and then ends the second one's tree.
DAEMON = ("-m", "sky.skylet.subprocess_daemon")
DSTACK_SECONDS = 10


def job(experiment: Experiment, shell: list[str], before: str) -> "subprocess.Popen[str]":
    """A shell that ends in the command of the files in deploy/, of one machine with two ranks."""
    words = [sys.executable, "-m", "pipeline"]
    params = ["--params", str(experiment.params)]
    command = shlex.join([*words, "lead", *params, *words, "train", *params])
    return subprocess.Popen(
        [*shell, f"{before} exec {command}"],
        cwd=ROOT,
        env=clean_environment() | {"PET_NPROC_PER_NODE": "2"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def saved_and_goes_on(experiment: Experiment, baseline: Experiment, said: str) -> int:
    """Nothing but the stop has saved; returns the step."""
    ended = status(experiment)
    assert (ended["outcome"], ended["exit_code"]) == ("stopped", 75), said
    assert ended["step"] == int(Path(ended["checkpoint"]).stem[-8:]) >= 50
    experiment.set(**LONGER)
    assert f"going on from {ended['checkpoint']}" in experiment.run("train")
    same_figures(experiment, baseline)
    return ended["step"]


@pytest.mark.fault(29, "SkyPilot's own daemon: SIGTERM to every process of a job, SIGKILL after 30 s")
def test_a_job_that_skypilot_cancels_has_saved(baseline: Experiment, experiment: Experiment, record_property: Note) -> None:
    programs = engine("skypilot", NO_SKYPILOT)
    experiment.set(**SELDOM).run("prepare")
    process = job(experiment, ["bash", "-c"], "true &&")
    watched = subprocess.Popen(["sleep", "600"])
    ids = ["--parent-pid", str(watched.pid), "--proc-pid", str(process.pid)]
    subprocess.run([str(programs / "python"), *DAEMON, *ids], stdout=subprocess.DEVNULL, check=True)
    wait_for_step(experiment, 50, process)
    watched.kill()
    watched.wait()
    began_at = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    elapsed_seconds = time.monotonic() - began_at
    assert elapsed_seconds < 30
    step = saved_and_goes_on(experiment, baseline, said)
    record_property("happened", f"75 at step {step}, {elapsed_seconds:.0f} s after it was cancelled; bit-equal when it went on")


@pytest.mark.fault(29, "a stop as dstack does it: SIGINT to the shell's process alone, SIGKILL after 10 s")
def test_a_job_that_dstack_stops_has_saved(baseline: Experiment, experiment: Experiment, record_property: Note) -> None:
    experiment.set(**SELDOM).run("prepare")
    process = job(experiment, ["bash", "-i", "-c"], "true && . /dev/null &&")
    wait_for_step(experiment, 50, process)
    os.kill(process.pid, signal.SIGINT)
    try:
        said, _ = process.communicate(timeout=DSTACK_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    assert process.returncode == 75, said
    step = saved_and_goes_on(experiment, baseline, said)
    record_property("happened", f"75 at step {step}, saved within 10 s; bit-equal when it went on")
