"""What `bench/gpu.py` keeps of a part that does not end in time."""

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from bench import gpu

TESTS = """
import time
import pytest

def test_first(record_property):
    record_property("proves", "that one is one")
    record_property("digests", "abc")

def test_second():
    assert 1 == 2

def test_third():
    pytest.skip("no GPU here")

def test_fourth():
    time.sleep(600)
"""


@pytest.mark.slow
def test_what_was_shown_before_the_limit_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n    docker\n")
    (tmp_path / "test_part.py").write_text(TESTS + "\npytestmark = pytest.mark.gpu\n")
    monkeypatch.setitem(gpu.TESTS, "rest", [str(tmp_path)])
    monkeypatch.setattr(gpu, "LIMIT_SECONDS", 20)
    found = gpu.tests("rest", argparse.Namespace(rehearse=True))
    assert [(one["test"], one["outcome"]) for one in found["tests"]] == [
        ("test_first", "passed"),
        ("test_second", "failed"),
        ("test_third", "skipped"),
    ]
    first, second, third = found["tests"]
    assert (first["proves"], first["recorded"]) == ("that one is one", {"digests": "abc"})
    assert "assert 1 == 2" in second["said"]
    assert "no GPU here" in third["said"]
    assert found["error"] == "pytest ended with not done after 20 s and 3 tests"


def test_rounds_that_were_measured_before_the_limit_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([100.0, 50.0, 110.0])

    def job(_: str, model: str, side: str, *__: object, **___: object) -> str:
        if (speed := next(answers, None)) is None:
            raise subprocess.TimeoutExpired("torchrun", 1)
        return json.dumps({"images_per_second": {"by hand" if side == "by hand" else "ddp": speed}})

    monkeypatch.setattr(gpu, "torchrun", job)
    monkeypatch.setitem(gpu.STEPS, "lenet", ("lenet", 7, "2"))
    monkeypatch.setattr(gpu, "variables", lambda _: {})
    figures = gpu.steps("lenet", argparse.Namespace(rehearse=False))["figures"]
    assert {name: (found["median"], found["n"]) for name, found in figures["images_per_second"].items()} == {
        "by hand": (100, 1),
        "ddp": (50, 1),
    }
    assert figures["to by hand"]["ddp"]["median"] == 0.5
