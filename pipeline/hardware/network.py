"""Host names, addresses, ports and interfaces of machines that talk over a network."""

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from pipeline.config import ConfigError, MachineError, PeerError

PORT = 29400
CONNECT_SECONDS = 5


def split(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, or of HOST with the default port."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return address, PORT
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is no address; write HOST:PORT, such as leader:{PORT}")
    return host.strip("[]"), int(port)


def endpoint(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(port: int, address: str | None = None) -> socket.socket:
    """Return a socket that listens on one of this machine's addresses, or on all; MachineError where it cannot."""
    try:
        if address is not None:
            family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=128)
        both = socket.has_dualstack_ipv6()
        return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=128)
    except OSError as error:
        if address is not None and interface(address) is None:
            raise MachineError(f"--bind {address}: no interface of this machine has this address; see: ip address") from None
        raise MachineError(f"port {port}: {error.strerror}; choose another: python -m pipeline lead --port {port + 1} …") from None
    except ValueError:
        raise ConfigError(f"--bind {address}: is no address of an interface; write for example --bind 10.0.0.5") from None


def wait_for_port(host: str, port: int, seconds: float, say: Callable[[str], None]) -> str:
    """Wait until a host accepts connections on a port, and return its address; `say` gets the first reason why it does not."""
    until, said = time.monotonic() + seconds, False
    while True:
        try:
            with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
                return str(connection.getpeername()[0])
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > until:
            raise PeerError(f"{host}:{port}: no leader in {seconds:.0f} s ({why}); start one there: python -m pipeline lead dvc repro")
        if not said:
            say(why)
            said = True
        time.sleep(0.5)


def own_address(host: str, port: int) -> str:
    """Return the local source address of a route to a host; no packet is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface(address: str) -> str | None:
    """Return the name of this machine's interface that has an address, or None."""
    for name, held in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address.partition("%")[0].removeprefix("::ffff:") for one in held):
            return name
    return None


def sockets() -> dict[int, str]:
    """Return this process's sockets, by their descriptors (Linux); a name is never given twice, as a descriptor is."""
    found: dict[int, str] = {}
    for one in Path("/proc/self/fd").iterdir():
        # It may be closed by now.
        with contextlib.suppress(OSError):
            if (name := str(one.readlink())).startswith("socket:"):
                found[int(one.name)] = name
    return found
