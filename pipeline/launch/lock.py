"""One process at a time works in a run's folder."""

import fcntl
import json
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pipeline.config import MachineError


@contextmanager
def held(path: Path) -> Generator[None]:
    """Hold the lock, or say who does; the kernel lets go of it when its holder ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MachineError(f"{path.parent}: this experiment is running already, {_holder(file)}; wait for it or stop it") from None
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
        os.truncate(file, 0)
        os.pwrite(file, json.dumps(mine).encode(), 0)
        yield
    finally:
        os.close(file)


def _holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return "as a process that has just begun"
    return f"on {holder['host']} as process {holder['pid']} since {holder['since']}"
