"""The parts that a bench is asked for: some, or all of them, and none that it does not have."""

import argparse
import subprocess
import sys

import pytest

from bench.arguments import add_parts
from tests.kit.experiment import ROOT


@pytest.mark.parametrize(("words", "parts"), [([], ["one", "two"]), (["two"], ["two"]), (["two", "one"], ["two", "one"])])
def test_no_name_is_all_of_them(words: list[str], parts: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parts(parser, {"one": 1, "two": 2})
    assert parser.parse_args(words).parts == parts


@pytest.mark.parametrize("script", ["run.py", "gpu.py", "faults.py"])
def test_an_unknown_part_is_told_with_the_known_ones(script: str) -> None:
    done = subprocess.run([sys.executable, f"bench/{script}", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert ": 'nothing' is none of " in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_part_and_a_gpu_it_says_what_is_missing() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "bench/gpu.py"], cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "bench/gpu.py: torch sees no GPU here; --rehearse runs it on the CPU\n"
