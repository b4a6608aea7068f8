"""A real Slurm cancels a job and ends it at its time limit: with `proctrack/linuxproc` both reach every process of a job at once."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.experiment import LONGER, ROOT, Experiment, clean_environment
from tests.kit.trainings import same_figures, status, wait_for_step
from tests.kit.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.slurm]
Note = Callable[[str, object], None]
# So seldom that only a stop saves.
SELDOM = LONGER | {"checkpoint__every_steps": 100_000}
LEAD = ("lead", "--port", "29412", sys.executable, "-m", "pipeline")


def sh(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT, env=clean_environment()).stdout.strip()


class SlurmJob:
    """A batch job that runs one command, and notes the exit code that its shell sees."""

    def __init__(self, experiment: Experiment, words: tuple[str, ...], *options: str):
        folder = experiment.folder
        self._code, script = folder / "code", folder / "job.sh"
        command = " ".join([sys.executable, "-m", "pipeline", *words, "train", "--params", str(experiment.params)])
        # A handler, or the shell would end before the command; what is ignored would be ignored by the command too.
        script.write_text(f"#!/bin/bash\ntrap : TERM\n{command}\necho $? > {self._code}\n")
        self.number = sh("sbatch", "--parsable", f"--output={folder / 'job.log'}", "--cpus-per-task=2", *options, str(script))

    def exit_code(self) -> int:
        until(lambda: self._code.exists() and self._code.read_text().strip(), seconds=200, every_seconds=0.2)
        return int(self._code.read_text())

    def end(self) -> None:
        subprocess.run(["scancel", "--full", "--signal=KILL", self.number], capture_output=True)


@pytest.fixture
def submit(experiment: Experiment) -> Iterator[Callable[..., SlurmJob]]:
    jobs: list[SlurmJob] = []

    def one(words: tuple[str, ...], *options: str) -> SlurmJob:
        jobs.append(SlurmJob(experiment, words, *options))
        return jobs[-1]

    yield one
    for job in jobs:
        job.end()


def stopped_and_saved(experiment: Experiment, at_least: int) -> int:
    ended = status(experiment)
    assert (ended["outcome"], ended["step"]) == ("stopped", int(Path(ended["checkpoint"]).stem[-8:])), "the step it stopped at is saved"
    assert ended["step"] >= at_least
    return ended["step"]


@pytest.mark.parametrize("words", [(), LEAD], ids=["train", "lead"])
@pytest.mark.fault(29, "`scancel` of a real Slurm job")
def test_a_cancelled_job_has_saved(
    baseline: Experiment, experiment: Experiment, submit: Callable[..., SlurmJob], words: tuple[str, ...], record_property: Note
) -> None:
    experiment.set(**SELDOM).run("prepare")
    job = submit(words)
    until(lambda: list(experiment.folder.glob("runs/*/journal.jsonl")))
    wait_for_step(experiment, 30)
    sh("scancel", job.number)
    assert job.exit_code() == 75, (experiment.folder / "job.log").read_text()
    step = stopped_and_saved(experiment, 30)
    experiment.set(**LONGER).run("train")
    same_figures(experiment, baseline)
    record_property("happened", f"75 at step {step}, saved; bit-equal when it went on")


@pytest.mark.fault(29, "the time limit of a real Slurm job")
def test_a_job_at_its_time_limit_has_saved(experiment: Experiment, submit: Callable[..., SlurmJob], record_property: Note) -> None:
    # Long enough for a limit of one minute, the shortest there is.
    experiment.set(**(SELDOM | {"train__epochs": 1000})).run("prepare")
    job = submit((), "--time=1")
    assert job.exit_code() == 75, (experiment.folder / "job.log").read_text()
    record_property("happened", f"75 at step {stopped_and_saved(experiment, 30)}, saved")
