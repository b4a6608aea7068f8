"""How long an end waits for the process that copies a run."""

import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest

from pipeline.runs import copy_process
from pipeline.runs.copy_process import CopyProcess, touched
from tests.kit.experiment import ROOT

# As one at nice 19 does on a busy machine, before it asks storage for the first time.
STARVED = """
import time
for _ in range(8):
    time.sleep(0.3)
    until = time.process_time() + 0.03
    while time.process_time() < until:
        pass
"""
DEAF = "import time; time.sleep(300)"
ANSWERED = """
import sys, time
from pathlib import Path
from pipeline.files import locked
from pipeline.runs.copy_process import LOCK, report
run = Path(sys.argv[1])
with locked(run / LOCK):
    for _ in range(8):
        time.sleep(0.3)
        report(run, 0)
"""
WAITS = """
import sys
from pathlib import Path
from pipeline.files import locked
from pipeline.runs.copy_process import LOCK
with locked(Path(sys.argv[1]) / LOCK):
    pass
"""


def started(program: str, run: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program, str(run)], cwd=ROOT, stdin=subprocess.PIPE)


def waiting_for(program: str, run: Path) -> CopyProcess:
    """A copy whose process runs this instead."""
    copying = CopyProcess(run, False)
    copying._process = started(program, run)  # pyright: ignore
    return copying


@pytest.mark.parametrize("program", [STARVED, ANSWERED], ids=["it computes now and then", "storage answers now and then"])
def test_a_copy_that_gets_on_slowly_is_waited_for(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_process, "NO_PROGRESS_SECONDS", 1.2)
    began_at = time.monotonic()
    assert waiting_for(program, tmp_path).finish(Event()) is None
    assert time.monotonic() - began_at > 2


def test_one_that_waits_while_an_earlier_starts_process_sends_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_process, "NO_PROGRESS_SECONDS", 1.2)
    with started(ANSWERED, tmp_path) as earlier:
        until = time.monotonic() + 60
        while not touched(tmp_path) and time.monotonic() < until:
            time.sleep(0.01)
        began_at = time.monotonic()
        assert waiting_for(WAITS, tmp_path).finish(Event()) is None
        assert time.monotonic() - began_at > 2
    assert earlier.returncode == 0


def test_one_that_waits_for_storage_alone_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_process, "NO_PROGRESS_SECONDS", 1.2)
    began_at = time.monotonic()
    assert "the rest took too long" in str(waiting_for(DEAF, tmp_path).finish(Event()))
    assert 1.2 < time.monotonic() - began_at < 10


def test_after_a_stop_request_one_that_gets_on_is_given_up_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_process, "STOPPED_SECONDS", 1.0)
    began_at = time.monotonic()
    assert "the rest took too long" in str(waiting_for(ANSWERED, tmp_path).finish(Event(), stopped=True))
    assert 1 < time.monotonic() - began_at < 10
