"""The machines' store on a real TCPStore: what one writes the others read, whatever happens to a writer."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from pipeline.cluster.store import ClusterStore, connect, serve
from pipeline.config import PeerError


class Interrupted(BaseException):
    """The writer was killed here."""


class Mortal:
    """A connection whose process is killed at its nth call, before or after the server has heard of it."""

    def __init__(self, values: TCPStore, dies_at: int, after: bool):
        self._values, self._left, self._after = values, dies_at, after

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._values, name)

        def counted(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                if self._after:
                    call(*arguments)
                raise Interrupted
            return call(*arguments)

        return counted


@pytest.fixture
def port() -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    number = listening.getsockname()[1]
    store = serve("127.0.0.1", number, listening)
    yield number
    del store


def test_every_value_of_several_writers_is_read_once_by_each_reader(port: int) -> None:
    writers, reader = [connect("127.0.0.1", port) for _ in range(3)], connect("127.0.0.1", port)
    for number in range(12):
        writers[number % 3].append("list", {"number": number})
        # torch sends it and does not wait: once the server answers something later, it has taken it.
        writers[number % 3].get("nothing")
    assert [one["number"] for one in reader.since("list", 0)] == list(range(12))
    assert [one["number"] for one in reader.since("list", 10)] == [10, 11]
    # Equal values are two values.
    writers[0].append("names", "a")
    writers[1].append("names", "a")
    for one in writers:
        one.get("nothing")
    assert reader.since("names", 0) == ["a", "a"]
    assert reader.get("nothing") is None
    writers[0].put("value", [1, None])
    # Nobody waits for a value to be taken; what one connection sends is taken in its order.
    assert writers[0].get("value") == [1, None]
    assert reader.get("value") == [1, None]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_writer_that_is_killed_at_any_call_hides_no_later_value(port: int, after: bool) -> None:
    others = connect("127.0.0.1", port)
    others.append("list", "first")
    values = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    died = 0
    for call in range(1, 10):
        try:
            ClusterStore(Mortal(values, call, after), "here").append("list", "of the killed")
        except Interrupted:
            died += 1
        others.append("list", f"later {call}")
        # What the killed one has sent may come behind it.
        assert f"later {call}" in others.since("list", 0)
    # One call does all of it.
    assert died == 1


def test_a_store_whose_leader_is_gone_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        leader = serve("127.0.0.1", number, listening)
    worker = connect("127.0.0.1", number)
    worker.put("value", 1)
    del leader
    with pytest.raises(PeerError, match=f"127.0.0.1:{number}: the leader is gone"):
        for _ in range(3):
            worker.get("value")


def test_no_leader_and_what_is_no_leader_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.cluster.store.TIMEOUT_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = other.getsockname()[1]

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = other.accept()
                    one.recv(10)
                    one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    one.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(PeerError, match=r"something answers, but it is no leader; is the port right\?"):
            connect("127.0.0.1", answering)
        other.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerError, match=rf"127.0.0.1:{answering}: no leader answers; has it ended\?"):
        connect("127.0.0.1", answering)
