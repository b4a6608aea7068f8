"""Checks of what several machines need: a name that resolves, a free port, and a leader that answers."""

import socket
import time

from pipeline.config import MachineError
from pipeline.doctor.finding import Finding, in_background
from pipeline.hardware.network import interface, listen

# How long a leader may take to answer, and the resolver to find this machine's name.
ANSWER_SECONDS, NAME_SECONDS = 1.8, 1.0
# A client of torch's TCPStore begins with VALIDATE and its magic number; to PING and four bytes the store answers with these four
# (torch/csrc/distributed/c10d/store/TCPStoreBackend.hpp). Asking in torch's own words would take the seconds of its import.
NONCE = b"ping"
HELLO = b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\x0d" + NONCE


def own_name(name: str) -> Finding:
    """Whether this machine's name resolves within a second: torch looks it up at every start."""
    fix = f'echo "127.0.1.1 {name}" | sudo tee -a /etc/hosts'
    started_at = time.monotonic()
    try:
        in_background(lambda: (socket.getaddrinfo(name, None), socket.getfqdn(name))).result(NAME_SECONDS)
    except TimeoutError:
        return Finding("wrong", f"this machine's name, {name}, takes more than {NAME_SECONDS:.0f} s to resolve", fix)
    except (OSError, ValueError):
        return Finding("wrong", f"this machine's name, {name}, does not resolve", fix)
    return Finding("ok", f"this machine's name, {name}, resolves in {1000 * (time.monotonic() - started_at):.0f} ms")


def port(number: int) -> Finding:
    """Whether a leader could listen on a port."""
    if not _taken(number):
        return Finding("ok", f"port {number} is free for a leader")
    free = next(other for other in range(number + 1, 65536) if not _taken(other))
    on_workers = f"python -m pipeline join {socket.gethostname()}:{free}"
    return Finding("wrong", f"port {number} is taken", f"python -m pipeline lead --port {free} dvc repro, and on the others {on_workers}")


def _taken(number: int) -> bool:
    """Try the port as `lead` would."""
    try:
        listen(number).close()
    except MachineError:
        return True
    return False


def leader(host: str, number: int) -> Finding:
    """Whether a leader answers at an address, and from which interface this machine reaches it."""
    where = f"{host}:{number}"
    try:
        connection = in_background(lambda: socket.create_connection((host, number), timeout=ANSWER_SECONDS)).result(ANSWER_SECONDS)
    except (socket.gaierror, UnicodeError):
        return Finding("wrong", f"the leader's name, {host}, does not resolve", f'echo "ITS-ADDRESS {host}" | sudo tee -a /etc/hosts')
    except ConnectionRefusedError:
        return Finding("wrong", f"no leader listens at {where}", f"on {host}: python -m pipeline lead --port {number} dvc repro")
    except OSError as error:
        text = f"the leader {where} cannot be reached ({error.strerror or 'no answer in time'})"
        return Finding("wrong", text, f"on {host}: sudo ufw allow {number}/tcp")
    with connection:
        address: str = connection.getsockname()[0]
        if not _answers_as_leader(connection):
            fix = (
                f"ask again in 10 s, as a leader may be starting; then see which program it is, on {host}: sudo ss -ltnp sport = :{number}"
            )
            return Finding("wrong", f"what listens at {where} does not answer as a leader", fix)
    through = interface(address) or "no interface of its own"
    return Finding("ok", f"the leader {where} answers; this machine reaches it from {address} ({through})")


def _answers_as_leader(connection: socket.socket) -> bool:
    """Whether the other side is a TCPStore; another server says nothing, or something else."""
    connection.settimeout(ANSWER_SECONDS / 2)
    try:
        connection.sendall(HELLO)
        return connection.makefile("rb").read(len(NONCE)) == NONCE
    except OSError:
        return False
