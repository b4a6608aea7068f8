"""The table of faults: `make faults` runs every test that is marked with a case, and prints what was done and what happened."""

from collections import defaultdict

import pytest
from rich.console import Console
from rich.table import Table

CASES = {
    1: "SIGKILL of any rank, at any step",
    2: "SIGKILL of a container, or of the leader",
    3: "SIGTERM to dvc, the train command, torchrun, one rank, pid 1 of a container",
    4: "SIGINT once, or twice, in each stage",
    5: "a rank stopped or hanging; a slow one",
    6: "a rank raises, segfaults or aborts",
    7: "out of memory",
    8: "disk full in a checkpoint, the journal, prepare, or an artifact",
    9: "a checkpoint cut at any length, or one bit flipped",
    10: "no good checkpoint left",
    11: "kill -9 between write, fsync, rename, pointer and retention",
    12: "a raw or prepared file truncated, flipped or missing",
    13: "wrong labels, classes, shapes, splits, images",
    14: "a data set that no world size divides",
    15: "NaN or infinity on one rank",
    16: "MLflow down at the start, in the middle, at the end",
    17: "MLflow black-holed, slow, answering 500 or 403, its disk full",
    18: "a run left RUNNING by kill -9",
    19: "a port taken; two jobs at once on one machine",
    20: "a second run of the same experiment",
    21: "resume on another world size",
    22: "parameters, data, code or versions changed since the checkpoint",
    23: "params.yaml wrong",
    24: "a placement that cannot be; a driver too old",
    25: "small /dev/shm, read-only root, missing volume, another uid",
    26: "the clock jumps an hour; names stop resolving",
    27: "a crash between the end of a stage and dvc.lock",
    28: "ten kills in one run; during a resume, at an epoch's end, at the last step",
    29: "SIGTERM to every process of a job at once, repeated within 3 s",
    30: "the reader of stdout or stderr goes, or never reads; the terminal closes",
    31: "a stranger's environment",
    32: "a power cut that loses or reorders what was not synced",
    33: "any file that a user can touch is empty, half, of another type, a folder, another's",
    34: "a network that drops, loses or delays packets",
    35: "a grace of 3, 10 or 30 s until SIGKILL",
    36: "a machine lost, with its disk or without; fewer are left",
    37: "a GPU's memory, driver or cuDNN that would change the bits",
    38: "a checkpoint or model that takes minutes to write, export or upload",
}
# A case without a test, or with one that did not run and pass, fails `make faults`.
REQUIRED = range(1, 39)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("fault"):
            number, done = mark.args
            assert number in CASES, f"{item.nodeid}: no case {number}"
            item.user_properties.append(("fault", (number, done)))


def rows_of(terminalreporter: pytest.TerminalReporter) -> dict[int, list[tuple[str, str, str]]]:
    """What was done, what happened and the outcome, of every test of every case."""
    rows: dict[int, list[tuple[str, str, str]]] = defaultdict(list)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            properties = dict(report.user_properties)
            happened = str(properties.get("happened", "" if outcome == "passed" else report.longreprtext[-120:]))
            for number, done in (value for name, value in report.user_properties if name == "fault"):
                rows[number].append((done, happened, "pass" if outcome == "passed" else outcome))
    return rows


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail unless every required case has a test and all its tests have passed; with --collect-only, unless it has a test."""
    if session.config.option.collectonly:
        tested = {value[0] for item in session.items for name, value in item.user_properties if name == "fault"}
        if not tested >= set(REQUIRED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not isinstance(reporter, pytest.TerminalReporter):
        # A worker of pytest-xdist; the process above it counts.
        return
    rows = rows_of(reporter)
    proven = [number for number in REQUIRED if rows.get(number) and all(outcome == "pass" for _, _, outcome in rows[number])]
    if exitstatus == 0 and len(proven) < len(REQUIRED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a table with a row for every test of every case; a case has passed when all of its tests have."""
    if terminalreporter.config.option.collectonly:
        return
    rows = rows_of(terminalreporter)
    table = Table("#", "case", "what was done", "what happened", "", width=190)
    passed = 0
    for number, case in CASES.items():
        found = rows.get(number) or [("", "no test was run", "missing" if number in REQUIRED else "none yet")]
        passed += all(outcome == "pass" for _, _, outcome in found)
        for index, (done, happened, outcome) in enumerate(found):
            table.add_row(
                str(number) if not index else "", case if not index else "", done, happened, outcome, end_section=done == found[-1][0]
            )
    console = Console(width=190, file=terminalreporter._tw._file)
    console.print(table)
    console.print(f"{passed} of {len(CASES)}")
