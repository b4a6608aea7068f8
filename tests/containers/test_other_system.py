"""The two commands on a system with another Python, with nothing but Python, git and make, for a user who is not root."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.checkout import clone_of
from tests.kit.compose import USER, sh

pytestmark = [pytest.mark.docker, pytest.mark.system, pytest.mark.timeout(2400)]


@pytest.fixture
def debian(tmp_path: Path) -> Iterator[list[str]]:
    """How to run something as a user of a bare Debian 13 that has a clone of this tree."""
    clone = clone_of(tmp_path / "lockstep")
    sh("chown", "-R", f"{USER}:{USER}", str(clone))
    name = f"debian-{os.getpid()}"
    sh(
        "docker",
        "run",
        "--detach",
        "--init",
        "--name",
        name,
        f"--volume={clone}:/home/user/lockstep",
        "debian:trixie-slim",
        "sleep",
        "infinity",
    )
    try:
        packages = "apt-get update -qq && apt-get install -qq --no-install-recommends python3 python3-venv git make"
        sh("docker", "exec", name, "sh", "-c", f"{packages} && useradd --uid {USER} user && chown user: /home/user")
        yield ["docker", "exec", f"--user={USER}", "--env=HOME=/home/user", "--workdir=/home/user/lockstep", name]
    finally:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=True)
        # With its environment of 6 GB.
        shutil.rmtree(clone)


def test_make_repro_and_the_fast_tests_pass_on_debian_13(debian: list[str], tmp_path: Path) -> None:
    assert "make repro" in sh(*debian, "make")
    assert "test accuracy" in sh(*debian, "make", "repro")
    assert json.loads((tmp_path / "lockstep" / "metrics" / "eval.json").read_text())["accuracy"] >= 0.90
    assert "didn't change" in sh(*debian, "make", "repro")
    assert "passed" in sh(*debian, "make", "test-fast")
