"""Checks of names, ports and leaders, with real sockets and a real leader."""

import re
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import psutil
import pytest
from torch.distributed import TCPStore

from pipeline.doctor import network
from pipeline.hardware.network import listen

HERE = {one.address for one in psutil.net_if_addrs()["lo"]}


@contextmanager
def listening(address: str = "127.0.0.1", port: int = 0) -> Generator[int]:
    """A server that takes connections and never says a word."""
    with socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        yield server.getsockname()[1]


@contextmanager
def replying(reply: bytes) -> Generator[int]:
    """A server that sends the same to everybody, or closes the connection if that is nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(reply)
                while reply and connection.recv(100):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::1"])
def test_a_port_that_is_taken_on_one_address_is_taken_and_the_next_one_that_is_named_is_free(address: str) -> None:
    if address == "::1" and address not in HERE:
        pytest.skip("no IPv6 here")
    with listening(address) as taken:
        found = network.port(taken)
        assert found.kind == "wrong"
        (free,) = {int(port) for port in re.findall(r"(?:--port |:)(\d+)", found.fix)}
        listen(free).close()
    assert network.port(taken).kind == "ok"


def test_a_name_of_this_machine_that_does_not_resolve_is_wrong() -> None:
    found = network.own_name("no-such-machine.invalid")
    assert found.kind == "wrong"
    assert found.fix == 'echo "127.0.1.1 no-such-machine.invalid" | sudo tee -a /etc/hosts'
    assert network.own_name("localhost").kind == "ok"


def test_a_leader_is_found_with_the_way_to_it() -> None:
    # What `lead` keeps open; a whole leader is asked in tests/commands/test_doctor.py.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = network.leader("127.0.0.1", store.port)
    assert (found.kind, found.text) == ("ok", f"the leader 127.0.0.1:{store.port} answers; this machine reaches it from 127.0.0.1 (lo)")
    # The question has not hurt it.
    TCPStore("127.0.0.1", store.port, is_master=False).set("verdict", "0")
    assert store.get("verdict") == b"0"


def test_where_no_leader_is_the_fix_says_what_to_start() -> None:
    with listening() as closed:
        pass
    found = network.leader("127.0.0.1", closed)
    assert (found.kind, found.fix) == ("wrong", f"on 127.0.0.1: python -m pipeline lead --port {closed} dvc repro")
    found = network.leader("no-such-machine.invalid", closed)
    assert found.kind == "wrong"
    assert "/etc/hosts" in found.fix


def test_a_server_that_listens_and_is_no_leader_is_wrong() -> None:
    """One that is silent (as `lead` is for its first seconds), one that closes the connection, and two that speak."""
    with listening() as silent, replying(b"") as closing, replying(b"SSH-2.0-OpenSSH_9.2\r\n") as ssh, replying(b"\r\n") as brief:
        for port in (silent, closing, ssh, brief):
            found = network.leader("127.0.0.1", port)
            assert (found.kind, found.text) == ("wrong", f"what listens at 127.0.0.1:{port} does not answer as a leader")
            assert found.fix.endswith(f"on 127.0.0.1: sudo ss -ltnp sport = :{port}")


def test_a_leader_that_drops_packets_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        started_at = time.monotonic()
        found = network.leader(*full.getsockname())
        # The kernel alone would go on for two minutes.
        assert network.ANSWER_SECONDS <= time.monotonic() - started_at < 20
        assert (found.kind, found.fix) == ("wrong", f"on 127.0.0.1: sudo ufw allow {full.getsockname()[1]}/tcp")
