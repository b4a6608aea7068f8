"""How long an end waits for the process that copies a run."""

import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest

from pipeline.runs import copy_process
from pipeline.runs.copy_process import CopyProcess

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
ANSWERED = "import os, time; [(time.sleep(0.3), os.write(1, b'.')) for _ in range(8)]"


def waiting_for(program: str, folder: Path) -> CopyProcess:
    """A copy whose process runs this instead."""
    copying = CopyProcess(folder, False)
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    copying._process = process  # pyright: ignore
    return copying


@pytest.mark.parametrize("program", [STARVED, ANSWERED], ids=["it computes now and then", "storage answers now and then"])
def test_a_copy_that_gets_on_slowly_is_waited_for(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_process, "NO_PROGRESS_SECONDS", 1.2)
    began_at = time.monotonic()
    assert waiting_for(program, tmp_path).finish(Event()) is None
    assert time.monotonic() - began_at > 2


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
