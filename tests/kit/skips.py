"""With LOCKSTEP_NO_SKIPS set, as in CI, a skipped test that could have run is a failure."""

import os

import pytest

NO_GPU, NO_SLURM, NO_BROWSER = "no GPU here", "no Slurm here", "no Chromium here"
# What `make engines` installs.
NO_RAY, NO_SKYPILOT, NO_DSTACK = "no Ray here", "no SkyPilot here", "no dstack here"
ALLOWED = (NO_GPU, NO_SLURM, NO_BROWSER, NO_RAY, NO_SKYPILOT, NO_DSTACK)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """What may be skipped even there is what needs a GPU, an engine, or a browser that .ci/run could not install."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    skipped = [report for report in reports if not any(reason in str(report.longrepr) for reason in ALLOWED)]
    if os.environ.get("LOCKSTEP_NO_SKIPS") and skipped and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
