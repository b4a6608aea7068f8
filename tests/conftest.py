"""Real ranks, real experiments in temporary folders, and what the command line lets a test ask for."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import yaml

from pipeline.files import locked
from tests.kit.checkout import clone_of
from tests.kit.compose import IMAGE, USER, Project, sh
from tests.kit.devices import MISSING
from tests.kit.experiment import LONGER, PACED, PACED_MODEL, ROOT, Experiment, clean_environment
from tests.kit.groups import run_ranks
from tests.kit.skips import FROM, NO_GPU, NO_SLURM, in_another_order, pytest_runtest_setup, pytest_sessionfinish
from tests.kit.threads import alone, thread_ranks

__all__ = ["alone", "pytest_runtest_setup", "pytest_sessionfinish", "run_ranks", "thread_ranks"]

# As ranks have it: kernels round differently with another number of threads.
torch.set_num_threads(1)
# The same examples in every run of `make test`; others in each one with `--hypothesis-profile=fuzz`. A busy machine is no failure.
hypothesis.settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=100)
hypothesis.settings.register_profile("fuzz", database=None, deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("ci")
# A shell's job in the background ignores a terminal's signals, one under nohup its loss, and so would all that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write tests/golden anew for this kind of machine")


def answers(*words: str) -> bool:
    return shutil.which(words[0]) is not None and subprocess.run(words, capture_output=True).returncode == 0


def longest_first(items: list[pytest.Item]) -> None:
    """Begin with the files whose tests may take longest, so that no worker ends with one of them while the others wait."""
    limits: dict[Path, float] = {}
    for item in items:
        timeout = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0), timeout.args[0] if timeout and timeout.args else 0)
    items.sort(key=lambda item: limits[item.path], reverse=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if FROM in os.environ:
        in_another_order(items)
    else:
        longest_first(items)
    no_engine, no_slurm = (not answers(*words) for words in (("docker", "info"), ("sinfo",)))
    for item in items:
        item.user_properties += [("proves", marker.args[0]) for marker in item.iter_markers("gpu") if marker.args]
        if MISSING and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
        if no_slurm and item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.skip(reason=NO_SLURM))
        if no_engine and item.get_closest_marker("docker"):
            item.add_marker(pytest.mark.skip(reason="no Docker engine answers here"))


@pytest.fixture
def experiment(tmp_path: Path, request: pytest.FixtureRequest) -> Experiment:
    experiment = Experiment(tmp_path).set()
    # What is fast trains nothing.
    return experiment.with_database() if request.node.get_closest_marker("slow") else experiment


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """The long experiment, left alone; one for all workers of pytest."""
    beside = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else tmp_path_factory.getbasetemp()
    experiment = Experiment(beside / "baseline")
    with locked(beside / "baseline.lock"):
        if not (experiment.folder / "done").exists():
            experiment.folder.mkdir(exist_ok=True)
            experiment.set(**LONGER).with_database().run("prepare")
            experiment.run("train")
            (experiment.folder / "done").touch()
    return experiment


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """The paced experiment on one machine, left alone."""
    experiment = Experiment(tmp_path_factory.mktemp("paced")).with_database()
    (experiment.folder / "mine.py").write_text(PACED_MODEL)
    experiment.set(**PACED).run("prepare")
    experiment.run("train")
    experiment.run("evaluate")
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
