"""Names, addresses and interfaces of machines that meet over a network."""

import socket
import time
from collections.abc import Callable

import psutil

from pipeline.config import ConfigError, MachineError, PeerError

PORT = 29400


def split(address: str) -> tuple[str, int]:
    """HOST:PORT, or HOST with the usual port."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return address, PORT
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no address; write HOST:PORT, such as leader:{PORT}")
    return host.strip("[]"), int(port)


def listen(port: int) -> socket.socket:
    """A socket that takes connections from anywhere; MachineError where the port is taken."""
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=128)
    except OSError as error:
        raise MachineError(f"port {port}: {error.strerror}; choose another: python -m pipeline lead --port {port + 1} …") from None


def reach(host: str, port: int, seconds: float, waiting: Callable[[str], None]) -> str:
    """The address under which a host takes connections on a port, when it does; `waiting` hears once why it does not yet."""
    until, told = time.monotonic() + seconds, False
    while True:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                return str(connection.getpeername()[0])
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > until:
            raise PeerError(f"{host}:{port}: no leader in {seconds:.0f} s ({why}); start one there: python -m pipeline lead dvc repro")
        if not told:
            waiting(why)
            told = True
        time.sleep(0.5)


def own_address(host: str, port: int) -> str:
    """This machine's address, as the other one sees it."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface(address: str) -> str | None:
    """The interface that has an address, if one of this machine's has."""
    for name, held in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address.partition("%")[0].removeprefix("::ffff:") for one in held):
            return name
    return None
