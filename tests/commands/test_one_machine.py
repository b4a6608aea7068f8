"""Who never has a second machine can delete what is for several, and misses only its two commands."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.experiment import ROOT, Experiment, clean_environment

FOR_SEVERAL = ("cluster", "lead.py", "join.py")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package without what is for several machines."""
    folder = tmp_path_factory.mktemp("laptop")
    shutil.copytree(ROOT / "pipeline", folder / "pipeline", ignore=shutil.ignore_patterns("__pycache__", *FOR_SEVERAL))
    assert not {path.name for path in (folder / "pipeline").iterdir()} & set(FOR_SEVERAL)
    return folder


def run(small: Path, *words: str, expect: int = 0) -> str:
    environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *words], cwd=small, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


@pytest.mark.parametrize("words", [["lead", "dvc", "repro"], ["join", "leader"]], ids=" ".join)
def test_a_command_for_several_machines_says_in_one_line_that_it_is_not_there(
    small: Path, words: list[str], experiment: Experiment
) -> None:
    (line,) = run(small, words[0], "--params", str(experiment.params), *words[1:], expect=2).splitlines()
    assert line == f"{words[0]}: this copy of the pipeline is without it; see: python -m pipeline --help"


def test_help_and_doctor_do_without(small: Path, experiment: Experiment) -> None:
    assert "train" in run(small, "--help")
    said = run(small, "doctor", "--params", str(experiment.params), "--leader", "127.0.0.1:1", expect=4)
    assert "Traceback" not in said
    assert "no leader listens at 127.0.0.1:1" in said


def test_without_the_packages_a_command_says_in_one_line_how_they_are_installed() -> None:
    done = subprocess.run([sys.executable, "-S", "-m", "pipeline", "doctor"], cwd=ROOT, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (4, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith("are not installed here; run: make setup, then: . .venv/bin/activate")


@pytest.mark.slow
def test_a_training_does_without(small: Path, experiment: Experiment) -> None:
    params = ("--params", str(experiment.params))
    run(small, "prepare", *params)
    run(small, "train", *params)
    run(small, "evaluate", *params)
    assert experiment.json("models/receipt.json")["placement"]["world_size"] == 2
    assert experiment.json("metrics/eval.json")["total"] > 0
