"""What `make faults` and CI take for passed: every required case, and nothing that was left out."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.report import CASES, REQUIRED
from tests.kit.experiment import ROOT

TEST = """
import pytest
from tests.faults import report
report.REQUIRED = [{required}]

@pytest.mark.fault(1, "nothing")
def test_of_a_case():
    {body}
"""


def session(folder: Path, body: str, required: str, plugin: str, **environment: str) -> int:
    """The exit code of pytest on one test."""
    (folder / "test_one.py").write_text(TEST.format(body=body, required=required))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = fault\n")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        plugin,
        "--rootdir",
        str(folder),
        "-c",
        "pytest.ini",
        ".",
    ]
    clean = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_NO_SKIPS"}
    return subprocess.run(words, cwd=folder, env=clean | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True).returncode


@pytest.mark.parametrize(
    ("body", "required", "code"), [("pass", "1", 0), ("pytest.skip()", "1", 1), ("pass", "1, 2", 1), ("assert False", "1", 1)]
)
def test_make_faults_fails_where_a_required_case_is_missing_or_skipped(tmp_path: Path, body: str, required: str, code: int) -> None:
    assert session(tmp_path, body, required, "tests.faults.report") == code


@pytest.mark.parametrize(
    ("body", "strict", "code"),
    [("pytest.skip('no tool')", "", 0), ("pytest.skip('no tool')", "1", 1), ("pytest.skip('no GPU here')", "1", 0), ("pass", "1", 0)],
)
def test_in_ci_a_skipped_test_that_could_have_run_is_a_failure(tmp_path: Path, body: str, strict: str, code: int) -> None:
    assert session(tmp_path, body, "", "tests.kit.skips", LOCKSTEP_NO_SKIPS=strict) == code


def test_every_required_case_has_a_test() -> None:
    marked: set[int] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                marked.add(ast.literal_eval(node.args[0]))
    assert marked <= set(CASES)
    assert sorted(set(REQUIRED) - marked) == []
