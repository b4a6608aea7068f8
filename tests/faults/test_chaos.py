"""A few faults of the campaign; `make chaos` does many."""

import itertools
import os
import subprocess
import sys

import pytest

from tests.faults.chaos_faults import BETWEEN, ENDING, PASSING
from tests.faults.chaos_plans import plan_of
from tests.kit.experiment import ROOT, clean_environment


def seed() -> int:
    """One for every commit: what is not done in one run of the tests is done in another, and a failure can be repeated."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout[:7], 16) if done.returncode == 0 else 1


@pytest.mark.parametrize("seed", range(1, 20))
def test_a_hundred_faults_are_of_every_kind(seed: int) -> None:
    planned: list[str] = []
    for number in itertools.count(1):
        for live, between in plan_of(seed, True, number):
            planned += [fault.kind for fault in (*live, *between)]
        if len(planned) >= 100:
            break
    assert {*PASSING, *ENDING, *BETWEEN} <= set(planned[:100])
    assert plan_of(seed, True, 7) == plan_of(seed, True, 7) != plan_of(seed + 1, True, 7)


@pytest.mark.slow
@pytest.mark.chaos
def test_random_faults_change_no_bit_and_leave_nothing_behind() -> None:
    words = [sys.executable, "-m", "tests.faults.chaos", f"--seed={seed()}", "--faults=4", "--jobs=1"]
    done = subprocess.run(words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 violations" in done.stdout
    if os.geteuid() != 0:
        pytest.skip("all else was done, but no disk was filled: only root can mount a small one")
