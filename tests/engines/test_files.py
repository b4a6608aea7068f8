"""`deploy/skypilot.yaml` and `deploy/dstack.yml`, as the engines' own code reads them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.kit.checkout import clone_of
from tests.kit.engines import engine, parse
from tests.kit.experiment import ROOT, clean_environment, settings
from tests.kit.skips import NO_DSTACK, NO_SKYPILOT

pytestmark = [pytest.mark.slow, pytest.mark.engine]
SKYPILOT, DSTACK = ROOT / "deploy" / "skypilot.yaml", ROOT / "deploy" / "dstack.yml"
READ_SKYPILOT = """
import json, sys
from sky.task import Task
task = Task.from_yaml(sys.argv[1])
(one,) = task.resources
print(json.dumps({"nodes": task.num_nodes, "run": task.run, "recovery": one.job_recovery, "env": task.envs}))
"""
READ_DSTACK = """
import sys, yaml
from dstack._internal.core.models.configurations import parse_run_configuration
print(parse_run_configuration(yaml.safe_load(open(sys.argv[1]))).model_dump_json())
"""
LEAD = "exec python -m pipeline lead dvc repro"


def with_typo(file: Path, right: str, wrong: str, folder: Path) -> Path:
    text = file.read_text()
    assert text.count(right) == 1
    (folder / file.name).write_text(text.replace(right, wrong))
    return folder / file.name


def test_skypilot_reads_its_file_and_would_recover_75_alone() -> None:
    done = parse(engine("skypilot", NO_SKYPILOT), READ_SKYPILOT, SKYPILOT)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    assert (read["nodes"], read["run"].splitlines()[-1]) == (2, LEAD)
    assert (read["recovery"]["recover_on_exit_codes"], read["recovery"]["max_restarts_on_errors"]) == ([75], 0)
    assert list(read["env"]) == ["LOCKSTEP_COPY", "LOCKSTEP_COMMIT"]


def test_a_managed_jobs_folder_has_no_git_and_trains(tmp_path: Path) -> None:
    folder = clone_of(tmp_path / "sky_workdir")
    shutil.rmtree(folder / ".git")
    (folder / ".venv").symlink_to(sys.prefix)
    values = yaml.safe_load((folder / "params.yaml").read_text())
    for section, changes in settings(dist__world_size=1, train__epochs=1).items():
        values[section] |= changes
    (folder / "params.yaml").write_text(yaml.safe_dump(values))
    task = yaml.safe_load(SKYPILOT.read_text())
    setup, run = task["setup"].replace("make setup\n", ""), task["run"].replace("dvc repro", "dvc repro train")
    done = subprocess.run(
        ["bash", "-c", f"{setup}\n{run}"],
        cwd=folder,
        env=clean_environment() | {"LOCKSTEP_COMMIT": "abc"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert json.loads((folder / "models" / "receipt.json").read_text())["git"]["commit"] == "abc"


@pytest.mark.parametrize(("right", "wrong"), [("num_nodes:", "num_node:"), ("job_recovery:", "job_recover:")])
def test_skypilot_refuses_a_typo(tmp_path: Path, right: str, wrong: str) -> None:
    done = parse(engine("skypilot", NO_SKYPILOT), READ_SKYPILOT, with_typo(SKYPILOT, right, wrong, tmp_path))
    assert done.returncode != 0
    assert wrong.strip(":") in done.stdout + done.stderr


def test_dstack_reads_its_file_and_ends_with_the_leader() -> None:
    done = parse(engine("dstack", NO_DSTACK), READ_DSTACK, DSTACK)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert (read["nodes"], read["commands"][-1]) == (2, LEAD)
    assert (read["stop_criteria"], read["startup_order"]) == ("master-done", "master-first")
    assert read["retry"]["on_events"] == ["no-capacity", "interruption"]


@pytest.mark.parametrize(("right", "wrong"), [("stop_criteria:", "stop_criterion:"), ("interruption]", "interuption]")])
def test_dstack_refuses_a_typo(tmp_path: Path, right: str, wrong: str) -> None:
    done = parse(engine("dstack", NO_DSTACK), READ_DSTACK, with_typo(DSTACK, right, wrong, tmp_path))
    assert done.returncode != 0
    assert "validation error" in done.stderr
