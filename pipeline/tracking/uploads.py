"""Requests to MLflow that carry a file: how long they may take, and how whoever waits sees that they get on."""

import contextlib
import os
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

# The number of the pipe for `report_answers`.
ANSWERS = "LOCKSTEP_ANSWERS"
# How long a server may take to answer, or to take another piece, in an upload: it answers when it has stored the whole file.
UPLOAD_SECONDS = 120
# Small enough that an upload is seen to advance by what has been read of the file, on a slow link too.
SEND_BUFFER_BYTES = 1 << 18
# MLflow's limit is one of the process: here is what it was before, once for every upload under way.
_limits: list[int] = []
_lock = threading.Lock()


@contextmanager
def uploading() -> Generator[None]:
    """Give MLflow's requests the time that a large file takes."""
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT as LIMIT

    with _lock:
        _limits.append(_limits[0] if _limits else LIMIT.get())
        LIMIT.set(max(UPLOAD_SECONDS, _limits[0]))
    try:
        yield
    finally:
        with _lock:
            before = _limits.pop()
            if not _limits:
                LIMIT.set(before)


def limit_send_buffers() -> None:
    """Let a socket hold little of a file: what it holds is read, but not sent."""
    from urllib3.connection import HTTPConnection

    options: Any = HTTPConnection.default_socket_options
    options.append((socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES))


def report_answers(pipe: int) -> None:
    """Write a byte for every answer of a server: whoever waits for this process sees that it gets on, however slow the server is."""
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool

    for pool in (HTTPConnectionPool, HTTPSConnectionPool):
        pool.ConnectionCls = _reporting(pool.ConnectionCls, pipe)


def _reporting(connection: Any, pipe: int) -> Any:
    class Reporting(connection):
        def getresponse(self, *arguments: Any, **named: Any) -> Any:
            answer = super().getresponse(*arguments, **named)
            # A full pipe has told enough, and one without a reader is asked for nothing.
            with contextlib.suppress(OSError):
                os.write(pipe, b".")
            return answer

    return Reporting
