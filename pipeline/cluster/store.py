"""The meeting place of several machines: a store that the leader keeps open, and what it and the workers read and write there.

torchrun's rendezvous uses the same store, so all that a job needs is one open port on the leader. Whoever reaches that port can
take part in the job: it belongs into a network that is trusted.
"""

import json
import os
from datetime import timedelta
from socket import socket
from typing import Any

from pipeline.config import PeerError

TIMEOUT_SECONDS = 30


class ClusterStore:
    """Values and growing lists by name; PeerError when the leader is gone."""

    def __init__(self, host: str, port: int, listening: socket | None = None):
        # Names without an address of the sixth kind are no news.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Only here: importing torch takes seconds.
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self._where = f"{host}:{port}"
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        descriptor = None if listening is None else listening.detach()
        try:
            self._store = TCPStore(
                host, port, is_master=descriptor is not None, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
            )
        except RuntimeError:
            raise PeerError(f"{self._where}: somebody answers, but no leader; is the port right?") from None

    def put(self, name: str, value: Any) -> None:
        """Set a value."""
        try:
            self._store.set(name, json.dumps(value))
        except RuntimeError as error:
            raise self._lost(error) from None

    def get(self, name: str) -> Any:
        """A value, or None while there is none."""
        try:
            return json.loads(self._store.get(name)) if self._store.check([name]) else None
        except RuntimeError as error:
            raise self._lost(error) from None

    def append(self, name: str, value: Any) -> None:
        """Put a value at the end of a list."""
        try:
            number = self._store.add(f"{name}/count", 1)
        except RuntimeError as error:
            raise self._lost(error) from None
        self.put(f"{name}/{number}", value)

    def since(self, name: str, count: int) -> list[Any]:
        """What a list has after its first `count` values."""
        found: list[Any] = []
        while (value := self.get(f"{name}/{count + len(found) + 1}")) is not None:
            found.append(value)
        return found

    def _lost(self, error: RuntimeError) -> PeerError:
        return PeerError(f"{self._where}: the leader is gone ({str(error).splitlines()[0][:200]}); start it again, and then join again")
