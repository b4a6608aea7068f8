"""The parts that a bench is asked for: some, or all of them, and none that it does not have."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.arguments import add_parts
from tests.kit.experiment import ROOT, make_job


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


@pytest.mark.parametrize("more", [[], ["--plain"]])
def test_independent_lanes_of_a_job_are_computed(more: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(make_job(tmp_path).model_dump_json())
    words = [sys.executable, "bench/independent.py", str(tmp_path / "job.json"), "2", *more]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images_per_second"] > 0
