"""What `make faults` and CI take for passed: every required case, and nothing that was left out."""

import ast
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.report import CASES, REQUIRED
from tests.kit.experiment import ROOT
from tests.kit.skips import FROM, UNTIL, in_another_order

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
    clean = {name: value for name, value in os.environ.items() if name not in ("LOCKSTEP_NO_SKIPS", UNTIL, FROM)}
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


@pytest.mark.parametrize(("minutes", "code"), [(-1, 0), (60, 1)])
def test_no_test_begins_after_the_limit_and_that_is_no_failure(tmp_path: Path, minutes: int, code: int) -> None:
    limit = {UNTIL: str(time.time() + minutes * 60), "LOCKSTEP_NO_SKIPS": "1"}
    assert session(tmp_path, "assert False", "", "tests.kit.skips", **limit) == code


def test_another_commit_begins_with_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    for commit in ("a", "a", "b"):
        items: list[Any] = [SimpleNamespace(path=Path(f"test_{number % 9}.py"), number=number) for number in range(27)]
        monkeypatch.setenv(FROM, commit)
        in_another_order(items)
        orders.append([one.path for one in items])
        # Tests of a file stay together, in their order.
        assert [one.number for one in items if one.path == Path("test_3.py")] == [3, 12, 21]
        assert len({(one, other) for one, other in pairwise(orders[-1]) if one != other}) == 8
    assert orders[0] == orders[1] != orders[2]


def test_every_required_case_has_a_test() -> None:
    marked: set[int] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                marked.add(ast.literal_eval(node.args[0]))
    assert marked <= set(CASES)
    assert sorted(set(REQUIRED) - marked) == []
