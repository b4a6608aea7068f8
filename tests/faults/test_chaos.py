"""A few faults of the campaign; `make chaos` does many."""

import subprocess
import sys

import pytest

from tests.kit.experiment import ROOT, clean_environment

pytestmark = pytest.mark.slow


def test_random_faults_change_no_bit_and_leave_nothing_behind() -> None:
    words = [sys.executable, "-m", "tests.faults.chaos", "--seed=1", "--faults=4", "--jobs=1"]
    done = subprocess.run(words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 violations" in done.stdout
