"""One process at a time works in a run's folder."""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from pipeline.config import MachineError
from pipeline.files import make_folder

log = logging.getLogger(__name__)


@contextmanager
def run_lock(path: Path, wait_seconds: float = 90) -> Generator[int]:
    """Hold the lock, or say who does; the kernel lets go of it when all who have its descriptor have ended, however they end.

    torchrun is given the descriptor too, and the rank that writes holds `writing.lock`: after a kill of the launcher its ranks are
    still saving, and the next start waits for them.
    """
    make_folder(path.parent)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        until, waiting = time.monotonic() + wait_seconds, False
        while not (mine := _locked(file)) or not _is_free(path.with_name("writing.lock")):
            if time.monotonic() > until or (not mine and _holder_lives(file)):
                raise MachineError(f"{path.parent}: this experiment is running already, {_holder(file)}; wait for it or stop it")
            if not waiting:
                log.info("%s: an earlier start was killed and its ranks are still saving; waiting for them", path.parent)
            waiting = True
            time.sleep(0.2)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
        os.truncate(file, 0)
        os.pwrite(file, json.dumps(me).encode(), 0)
        yield file
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(path: Path) -> bool:
    """Whether nobody holds this lock now."""
    with path.open("a") as file:
        return _locked(file.fileno())


def _holder_lives(file: int) -> bool:
    """Return False if the launcher that took the lock has ended, as far as this machine can tell."""
    holder = _read_holder(file)
    return holder is None or holder["host"] != socket.gethostname() or psutil.pid_exists(holder["pid"])


def _holder(file: int) -> str:
    holder = _read_holder(file)
    if holder is None:
        return "as a process that has just begun"
    return f"on {holder['host']} as process {holder['pid']} since {holder.get('since')}"


def _read_holder(file: int) -> dict[str, Any] | None:
    try:
        holder: dict[str, Any] = json.loads(os.pread(file, 4096, 0))
        return holder if isinstance(holder["host"], str) and 0 < int(holder["pid"]) < 1 << 31 else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
