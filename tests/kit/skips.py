"""With LOCKSTEP_NO_SKIPS set, as in CI, a skipped test that could have run is a failure."""

import os

import pytest

NO_GPU = "no GPU here"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """What may be skipped even there is what needs a GPU."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [report for report in reporter.stats.get("skipped", []) if NO_GPU not in str(report.longrepr)] if reporter else []
    if os.environ.get("LOCKSTEP_NO_SKIPS") and skipped and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
