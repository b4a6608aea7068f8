"""A plugin of pytest: what each test proves and how it ended, as a line of JSON at once: a run that is cut off keeps them."""

import json
import os
from pathlib import Path

import pytest

FILE = "BENCH_OUTCOMES"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a test down, and once more if its fixtures fail."""
    if report.when != "call" and report.outcome == "passed":
        return
    found = dict(report.user_properties)
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report.longrepr, "reprcrash", report.longrepr)
    values = {
        "proves": found.pop("proves", ""),
        "test": report.nodeid.rpartition("::")[2],
        "outcome": report.outcome,
        "seconds": round(report.duration, 1),
        "recorded": found,
        "said": str(getattr(said, "message", said) or "")[:2000],
    }
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(values) + "\n")
