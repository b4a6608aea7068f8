"""The store that the machines of a job share: `lead` keeps it open; the leader's stages and the workers read and write it.

torchrun's rendezvous uses the same store, so a job needs one open port on the leader and nothing else. Everybody who reaches that
port can take part in the job: use it in a trusted network only.
"""

import contextlib
import json
import os
import socket
from collections.abc import Generator
from datetime import timedelta
from typing import Any, Protocol

from pipeline.config import PeerError
from pipeline.hardware.network import endpoint, sockets

# For how long the network to the leader may be silent; a lost worker is let go earlier.
TIMEOUT_SECONDS, KEEPALIVE_SECONDS = 30, 5


class KeyValueStore(Protocol):
    """The calls of torch's TCPStore that are used here; each is atomic, and raises RuntimeError once the server is gone."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value; waits for it while there is none."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have a value."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, which is 0 while there is none; returns it."""
        ...

    def append(self, key: str, value: str, /) -> None:
        """Put text behind that of a value, which is empty while there is none."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value that is `expected` ("" = absent) to `desired`; returns what the value is then."""
        ...


class ClusterStore:
    """Values and append-only lists by name; every call raises PeerError once the leader is gone."""

    def __init__(self, values: KeyValueStore, where: str):
        self._values, self._where = values, where

    def put(self, name: str, value: Any) -> None:
        """Set a value."""
        with self._peer_errors():
            self._values.set(name, json.dumps(value))

    def get(self, name: str) -> Any:
        """Return a value, or None while there is none."""
        with self._peer_errors():
            return json.loads(self._values.get(name)) if self._values.check([name]) else None

    def count(self, name: str) -> None:
        """Add one to a number, which `get` returns."""
        with self._peer_errors():
            self._values.add(name, 1)

    def decide(self, name: str, value: Any) -> Any:
        """Set a value, unless there is one; returns what it is then, the same for all who ask."""
        with self._peer_errors():
            return json.loads(self._values.compare_set(name, "", json.dumps(value)))

    def append(self, name: str, value: Any) -> None:
        """Put a value at the end of a list, in one atomic call: a killed writer leaves nothing half done, and many do not meet."""
        with self._peer_errors():
            self._values.append(name, json.dumps(value) + "\n")

    def since(self, name: str, count: int) -> list[Any]:
        """Return what a list has after its first `count` values."""
        with self._peer_errors():
            lines = self._values.get(name).splitlines() if self._values.check([name]) else []
        return [json.loads(one) for one in lines[count:]]

    @contextlib.contextmanager
    def _peer_errors(self) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            why = str(error).splitlines()[0][:200]
            raise PeerError(f"{self._where}: the leader is gone ({why}); start it again, and then join again") from None


def serve(host: str, port: int, listening: socket.socket) -> ClusterStore:
    """Return a store that this process keeps open for others on a listening socket, which it reaches itself under a host's name."""
    return _open(host, port, listening.detach())


def connect(host: str, port: int, job: str = "") -> ClusterStore:
    """Return a leader's store, or one job's part of it."""
    return _open(host, port, None, job)


def _open(host: str, port: int, descriptor: int | None, job: str = "") -> ClusterStore:
    # Silences c10d's warning for host names without an IPv6 address.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Only here: importing torch takes seconds.
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    timeout, where = timedelta(seconds=TIMEOUT_SECONDS), endpoint(host, port)
    try:
        store = TCPStore(host, port, is_master=descriptor is not None, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor)
    except RuntimeError as error:
        silent = "trying to connect" in str(error)
        why = "no leader answers; has it ended?" if silent else "something answers, but it is no leader; is the port right?"
        raise PeerError(f"{where}: {why}") from None
    _limit_silence(port)
    return ClusterStore(PrefixStore(job, store) if job else store, where)  # pyright: ignore[reportArgumentType]


def _limit_silence(port: int) -> None:
    """Let connections to the store fail once the network is silent; a leader that is only stopped still acknowledges."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    options = {
        socket.TCP_USER_TIMEOUT: 1000 * TIMEOUT_SECONDS,
        socket.TCP_KEEPIDLE: KEEPALIVE_SECONDS,
        socket.TCP_KEEPINTVL: KEEPALIVE_SECONDS,
    }
    for descriptor in sockets():
        # It may be closed by now, or have no peer.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in options.items():
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
