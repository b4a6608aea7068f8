"""Real ranks, real experiments in temporary folders, and what the command line lets a test ask for."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline import prepare
from pipeline.config import Config
from pipeline.files import Paths
from pipeline.job import Job
from tests.compose import IMAGE, USER, Project, sh
from tests.groups import run_ranks

__all__ = ["run_ranks"]

ROOT = Path(__file__).parents[1]
# As ranks have it: kernels round differently with another number of threads.
torch.set_num_threads(1)
# A shell's job in the background ignores Ctrl-C, and so would all that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write tests/golden anew for this kind of machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = not torch.cuda.is_available()
    no_engine = shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode != 0
    for item in items:
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
        if no_engine and item.get_closest_marker("docker"):
            item.add_marker(pytest.mark.skip(reason="no Docker engine answers here"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a skipped test that could have run is a failure; what may be skipped there is what needs a GPU."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [report for report in reporter.stats.get("skipped", []) if "no GPU here" not in str(report.longrepr)] if reporter else []
    if os.environ.get("LOCKSTEP_NO_SKIPS") and skipped and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def settings(**changes: Any) -> dict[str, Any]:
    """A small experiment that takes seconds; `train__epochs=2` changes one key."""
    values: dict[str, Any] = {
        "data": {"name": "synthetic:1200"},
        "train": {"epochs": 2, "precision": "fp32", "learning_rate": 0.05},
        "dist": {"batch_size_per_gpu": 48, "world_size": 2, "lanes": 4},
        "checkpoint": {"every_steps": 5, "keep": 2},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            values.setdefault(section, {})[key] = value
        else:
            values[section] = value
    return values


# With a global batch that three ranks can share.
SMALL = settings(data__name="synthetic:3000", dist__batch_size_per_gpu=96)


# Long enough to be hurt.
LONGER = {"data": {"name": "synthetic:6000"}, "train__epochs": 4, "model__name": "lenet", "checkpoint__every_steps": 20}


def clean_environment() -> dict[str, str]:
    """This environment without what would send an experiment's run elsewhere; `mlflow.set_tracking_uri` in a test sets such a thing."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "DVC_"))}


@dataclass
class Experiment:
    """A params file in a folder of its own, and the commands on it."""

    folder: Path

    def set(self, **changes: Any) -> "Experiment":
        self.params.write_text(yaml.safe_dump(settings(**changes)))
        return self

    @property
    def params(self) -> Path:
        return self.folder / "params.yaml"

    @property
    def run_folder(self) -> Path:
        (found,) = (path.parent for path in (self.folder / "runs").glob("*/journal.jsonl"))
        return found

    def start(self, command: str, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", command, "--params", str(self.params), *words],
            cwd=ROOT,
            env=clean_environment() | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str, *words: str, expect: int = 0, **environment: str) -> str:
        process = self.start(command, *words, **environment)
        said, _ = process.communicate(timeout=280)
        assert process.returncode == expect, said
        return said

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def journal(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run_folder / "journal.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == kind]


def clone_of(folder: Path) -> Path:
    """This tree, with what is not committed yet, as a clone of its own."""
    # Without hard links: a clone may be given to another user.
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(folder)], check=True)
    listed = subprocess.run(["git", "ls-files", "-mo", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    commit(folder, "what is not committed yet")
    return folder


def commit(folder: Path, message: str) -> None:
    """Commit all of a clone, if there is anything."""
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run([*git, "add", "-A"], cwd=folder, check=True)
    subprocess.run([*git, "commit", "-qm", message, "--allow-empty"], cwd=folder, check=True)


def readme_commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def needs_docker(command: str) -> bool:
    return "docker" in command or command == "make up" or "experiment/" in command or ".env" in command


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return Experiment(tmp_path).set()


def make_job(folder: Path, precision: str = "fp32", **changes: Any) -> Job:
    """A job on the CPU as the launcher would write it, with its data prepared."""
    folder.mkdir(parents=True, exist_ok=True)
    config = Config.model_validate(settings(**changes))
    paths = Paths(folder / "params.yaml")
    if not paths.prepared.exists():
        prepare.run(config, paths)
    values = {
        "config": config,
        "device": "cpu",
        "backend": "gloo",
        "precision": precision,
        "prepared": paths.prepared,
        "run": folder / "run",
    }
    return Job.model_validate(values)


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """The long experiment, left alone."""
    experiment = Experiment(tmp_path_factory.mktemp("baseline")).set(**LONGER)
    experiment.run("prepare")
    experiment.run("train")
    return experiment


@pytest.fixture(scope="session")
def image() -> str:
    """The image of this tree."""
    sh("docker", "build", "--quiet", "--tag", IMAGE, str(ROOT))
    return IMAGE


@pytest.fixture
def project(image: str, tmp_path: Path) -> Iterator[Callable[..., Project]]:
    """`project("name")`: a clone with an environment of its own, taken down in the end."""
    made: list[Project] = []

    def make(name: str, *files: str) -> Project:
        made.append(Project(clone_of(tmp_path / name), clean_environment(), *files))
        # Owned by one who is not root, with all that leads there open to them.
        sh("chown", "-R", f"{USER}:{USER}", str(tmp_path / name))
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
                folder.chmod(0o755)
        return made[-1]

    yield make
    for one in made:
        one.compose("down", "--volumes", "--timeout=5", expect=None)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], str]:
    """The digest that an experiment ends with outside containers."""
    known: dict[str, str] = {}

    def digest(values: dict[str, Any]) -> str:
        key = json.dumps(values)
        if key not in known:
            one = Experiment(tmp_path_factory.mktemp("outside"))
            one.params.write_text(yaml.safe_dump(values))
            one.run("prepare")
            one.run("train")
            known[key] = one.json("models/receipt.json")["weights_sha256"]
        return known[key]

    return digest
