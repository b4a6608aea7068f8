"""Where a mirror sends what it reads, and how long anyone waits for it."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from threading import Event

import psutil
import pytest

from pipeline.files import Paths
from pipeline.tracking import mirror_process
from pipeline.tracking.mirror_process import MirrorProcess, address, without_credentials


def suspended_mirror(folder: Path) -> MirrorProcess:
    """As one that is starved beside a training: it does not sleep, and gets on no further."""
    mirror = MirrorProcess(folder / "runs" / "0123456789abcdef", Paths(folder / "params.yaml"))
    psutil.Process(mirror._process.pid).send_signal(signal.SIGSTOP)
    return mirror


def test_publishing_waits_for_the_id_of_a_run_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_process, "RUN_ID_SECONDS", 1)
    mirror = suspended_mirror(tmp_path)
    started_at = time.monotonic()
    assert mirror.run_id(Event()) is None
    assert 1 <= time.monotonic() - started_at < 10
    mirror._process.kill()
    assert mirror.wait() is not None


def test_who_asks_again_to_stop_waits_for_no_id(tmp_path: Path) -> None:
    mirror, hurried = suspended_mirror(tmp_path), Event()
    threading.Timer(0.3, hurried.set).start()
    started_at = time.monotonic()
    assert mirror.run_id(hurried) is None
    assert time.monotonic() - started_at < 10
    mirror._process.kill()
    assert mirror.wait() is not None


def test_after_a_stop_request_a_mirror_that_a_busy_machine_starves_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_process, "STOPPED_SECONDS", 1)
    mirror = suspended_mirror(tmp_path)
    (tmp_path / "runs" / "0123456789abcdef" / "journal.jsonl").touch()
    started_at = time.monotonic()
    assert mirror.finish(Event(), lambda _: None, stopped=True) is not None
    assert 1 <= time.monotonic() - started_at < 6


@pytest.mark.parametrize("content", [b"", b"\xff", b"-5", b"0", b"9" * 30, b"[" * 99, b"1", None])
def test_of_a_lock_that_names_no_mirror_of_the_run_the_own_one_is_looked_at(content: bytes | None, tmp_path: Path) -> None:
    mirror = suspended_mirror(tmp_path)
    lock = tmp_path / "runs" / "0123456789abcdef" / "mirror.lock"
    lock.unlink(missing_ok=True)
    lock.mkdir() if content is None else lock.write_bytes(content)
    assert mirror._sender().pid == mirror._process.pid
    mirror._process.kill()
    assert mirror.wait() is not None


# What holds a lock under the name of a mirror: it sleeps, or gets no CPU, as a busy machine has it.
EARLIER = """
import fcntl, os, signal, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(str(os.getpid()))
file.flush()
print("held", flush=True)
if sys.argv[2] == "starves":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
"""


@pytest.mark.parametrize("what", ["sleeps", "starves"])
def test_a_mirror_that_waits_for_an_earlier_one_is_given_up_only_if_that_sleeps(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_process, "DEAF_SECONDS", 1)
    monkeypatch.setattr(mirror_process, "RECEIVING_SECONDS", 4 if what == "starves" else 60)
    run = tmp_path / "runs" / "0123456789abcdef"
    run.mkdir(parents=True)
    (run / "journal.jsonl").touch()
    words = [sys.executable, "-c", EARLIER, str(run / "mirror.lock"), what, mirror_process.MIRROR, str(run)]
    earlier = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert earlier.stdout is not None
        assert earlier.stdout.readline() == b"held\n"
        started_at = time.monotonic()
        error = MirrorProcess(run, Paths(tmp_path / "params.yaml")).finish(Event(), lambda _: None)
        waited_seconds = time.monotonic() - started_at
    finally:
        earlier.kill()
        earlier.communicate()
    assert error is not None
    if what == "sleeps":
        assert waited_seconds < 30
        assert error.startswith("the server has not answered in ")
    else:
        assert waited_seconds >= 4
        assert error.startswith("the server was still receiving after ")


@pytest.mark.parametrize(
    ("given", "server", "name"),
    [
        ("https://mlflow.example.com/team@corp", "https://mlflow.example.com/team@corp", None),
        ("https://me:secret@mlflow.example.com/team@corp", "https://mlflow.example.com/team@corp", "me"),
        ("https://me:p%40ss@mlflow.example.com:5000/at", "https://mlflow.example.com:5000/at", "me"),
        ("https://me:p@ss@mlflow.example.com:5000", "https://mlflow.example.com:5000", "me"),
    ],
)
def test_an_at_in_the_path_of_an_address_is_no_end_of_a_password(given: str, server: str, name: str | None) -> None:
    uri, credentials = without_credentials(given)
    assert (uri, credentials.get("MLFLOW_TRACKING_USERNAME")) == (server, name)


def test_the_link_to_a_run_says_how_its_own_store_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = {
        # Relative: to the experiment's folder.
        None: "make ui IN=one)",
        "sqlite:///team/mlflow.db": "make ui IN=one/team)",
        f"sqlite:///{tmp_path}/mlflow.db": "make ui)",
        "sqlite:////else/where/mlflow.db": "make ui IN=/else/where)",
        "sqlite:////else/team.db": "mlflow server --backend-store-uri sqlite:////else/team.db)",
        "postgresql://me:secret@host/runs": "mlflow server --backend-store-uri $MLFLOW_TRACKING_URI)",
    }
    for uri, said in expected.items():
        if uri is None:
            monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        else:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert address(tmp_path, Paths(Path("one/params.yaml"))).endswith(f" (after: {said}"), uri
