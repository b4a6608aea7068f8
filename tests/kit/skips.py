"""With LOCKSTEP_NO_SKIPS set, as in CI, a skipped test that could have run is a failure.

With LOCKSTEP_TESTS_UNTIL set to seconds since 1970, as in CI too, no test begins later: a machine of half the speed runs what it can,
says what it has left out, and with another commit as LOCKSTEP_TESTS_FROM begins elsewhere.
"""

import os
import random
import time

import pytest

NO_GPU, NO_SLURM, NO_BROWSER = "no GPU here", "no Slurm here", "no Chromium here"
# What `make engines` installs.
NO_RAY, NO_SKYPILOT, NO_DSTACK = "no Ray here", "no SkyPilot here", "no dstack here"
# Under a quota, on other CPUs.
NOT_BOUND = "ranks share no memory here"
NO_GOLDEN = "has no golden figures"
NO_TIME = "no time left here"
ALLOWED = (NO_GPU, NO_GOLDEN, NOT_BOUND, NO_SLURM, NO_BROWSER, NO_RAY, NO_SKYPILOT, NO_DSTACK, NO_TIME)
UNTIL, FROM = "LOCKSTEP_TESTS_UNTIL", "LOCKSTEP_TESTS_FROM"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what would begin too late."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(NO_TIME)


def in_another_order(items: list[pytest.Item]) -> None:
    """Files in an order that is a function of the commit, so that what one has no time for comes first with another."""
    files = list(dict.fromkeys(item.path for item in items))
    random.Random(os.environ[FROM]).shuffle(files)
    items.sort(key=lambda item: files.index(item.path))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """What may be skipped even there is what needs a GPU, an engine, or a browser that .ci/run could not install."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    skipped = [report for report in reports if not any(reason in str(report.longrepr) for reason in ALLOWED)]
    if os.environ.get("LOCKSTEP_NO_SKIPS") and skipped and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
