"""What can go wrong between machines: names, ports and MLflow; every question has an end."""

import base64
import contextlib
import json
import os
import shlex
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from pipeline.config import MachineError
from pipeline.hardware.network import interface, listen

T = TypeVar("T")
# How long a server may take to answer, and the resolver to know this machine.
ANSWER_SECONDS, NAME_SECONDS = 1.8, 1.0
LATER = "docker compose up -d mlflow, or start it elsewhere; training does not wait for it: python -m pipeline sync afterwards"
SEARCH = "/api/2.0/mlflow/experiments/search?max_results=1"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: what it found and, if that is wrong, what cures it."""

    kind: Literal["ok", "note", "wrong"]
    text: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<7}{self.text}" + (f": {self.cure}" if self.cure else "")


def ask(question: Callable[[], T]) -> Future[T]:
    """The answer to come; a question without an end holds nobody up, not even at exit."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(question())
        except (OSError, ValueError, HTTPException) as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer


def own_name(name: str) -> Finding:
    """Whether this machine's name resolves, and fast: torch asks for it at every start."""
    cure = f'echo "127.0.1.1 {name}" | sudo tee -a /etc/hosts'
    started_at = time.monotonic()
    try:
        ask(lambda: (socket.getaddrinfo(name, None), socket.getfqdn(name))).result(NAME_SECONDS)
    except TimeoutError:
        return Finding("wrong", f"this machine's name, {name}, takes more than {NAME_SECONDS:.0f} s to resolve", cure)
    except (OSError, ValueError):
        return Finding("wrong", f"this machine's name, {name}, does not resolve", cure)
    return Finding("ok", f"this machine's name, {name}, resolves in {1000 * (time.monotonic() - started_at):.0f} ms")


def port(number: int) -> Finding:
    """Whether a leader could listen on a port."""
    if not _taken(number):
        return Finding("ok", f"port {number} is free for a leader")
    free = next(other for other in range(number + 1, 65536) if not _taken(other))
    elsewhere = f"python -m pipeline join {socket.gethostname()}:{free}"
    return Finding("wrong", f"port {number} is taken", f"python -m pipeline lead --port {free} dvc repro, and on the others {elsewhere}")


def _taken(number: int) -> bool:
    """Whether a leader that listens as leaders do is refused."""
    try:
        listen(number).close()
    except MachineError:
        return True
    return False


def leader(host: str, number: int) -> Finding:
    """Whether the leader is there, and the way to it."""
    try:
        address, through = ask(lambda: _reach(host, number)).result(ANSWER_SECONDS)
    except (socket.gaierror, UnicodeError):
        return Finding("wrong", f"the leader's name, {host}, does not resolve", f'echo "ITS-ADDRESS {host}" | sudo tee -a /etc/hosts')
    except ConnectionRefusedError:
        return Finding("wrong", f"no leader listens at {host}:{number}", f"on {host}: python -m pipeline lead --port {number} dvc repro")
    except OSError as error:
        why = f"the leader {host}:{number} cannot be reached ({error.strerror or 'no answer in time'})"
        return Finding("wrong", why, f"on {host}: sudo ufw allow {number}/tcp")
    return Finding("ok", f"the leader {host}:{number} answers; from here through {through} as {address}")


def _reach(host: str, number: int) -> tuple[str, str]:
    """The local address that a server is reached from, and the interface that has it."""
    with socket.create_connection((host, number), timeout=ANSWER_SECONDS) as connection:
        address: str = connection.getsockname()[0]
    return address, interface(address) or "no interface of this machine"


def mlflow(uri: str) -> Finding:
    """Whether MLflow's store takes what a run sends; no credential of the uri is told."""
    scheme = uri.partition(":")[0].lower() if ":" in uri else ""
    if scheme in ("http", "https"):
        try:
            return _server(urlsplit(uri))
        except ValueError:
            cure = "percent-encode its name and password, as in MLFLOW_TRACKING_URI=http://me:p%40ss@host:5000"
            return Finding("wrong", "MLFLOW_TRACKING_URI is no address", cure)
    if scheme == "sqlite":
        return _database(Path(uri.removeprefix("sqlite:///").partition("?")[0]))
    if scheme in ("", "file") and not _is_set("MLFLOW_ALLOW_FILE_STORE"):
        return Finding("wrong", "MLflow writes to no plain folder any more (MLFLOW_TRACKING_URI)", "unset MLFLOW_TRACKING_URI")
    return Finding("note", f"MLflow's store is {scheme or 'a folder'}, which was not asked")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("true", "1")


def _database(path: Path) -> Finding:
    where = shlex.quote(str(path.parent))
    if not path.parent.is_dir():
        return Finding("wrong", f"MLflow's database needs the folder {path.parent}", f"mkdir -p {where}")
    for one in (path.parent, path):
        if one.exists() and not os.access(one, os.W_OK, effective_ids=True):
            cure = f"sudo chown {os.geteuid()}:{os.getegid()} {shlex.quote(str(one))}"
            return Finding("wrong", f"MLflow's database {path} cannot be written as uid {os.geteuid()}", cure)
    return Finding("ok", f"MLflow's database {path} can be written")


def _server(uri: SplitResult) -> Finding:
    """What a client would hear from the server."""
    if "@" in uri.path + uri.query + uri.fragment or not uri.hostname:
        raise ValueError("a password with a slash, or no host")
    host = f"[{uri.hostname}]" if ":" in uri.hostname else uri.hostname
    # A client leaves out the usual port, and the server compares to the letter.
    if uri.port and (uri.scheme, uri.port) not in (("http", 80), ("https", 443)):
        host = f"{host}:{uri.port}"
    shown = f"{uri.scheme}://{host}{uri.path.rstrip('/')}"
    try:
        status, body = ask(lambda: _get(f"{shown}{SEARCH}", _credentials(uri))).result(ANSWER_SECONDS)
    except urllib.error.URLError as error:
        return _unreachable(shown, error.reason)
    except (OSError, HTTPException) as error:
        return _unreachable(shown, error)
    return _judge(shown, host, status, body)


def _credentials(uri: SplitResult) -> str:
    """What MLflow's client puts into the Authorization header."""
    name, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if uri.username or uri.password:
        name, password = unquote(uri.username or ""), unquote(uri.password or "")
    if name and password:
        return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return f"Bearer {token}" if token else ""


def _get(url: str, credentials: str) -> tuple[int, bytes]:
    """Status and beginning of the answer."""
    request = urllib.request.Request(url)
    if credentials:
        # They stay with the server that they are for.
        request.add_unredirected_header("Authorization", credentials)
    trust = ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))
    if _is_set("MLFLOW_TRACKING_INSECURE_TLS"):
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS, context=trust) as answer:
            return answer.status, answer.read(1 << 20)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(1 << 10)


def _judge(shown: str, host: str, status: int, body: bytes) -> Finding:
    """What an answer means."""
    if status == 200:
        with contextlib.suppress(ValueError):
            json.loads(body)
            return Finding("ok", f"MLflow answers at {shown}")
        return Finding("wrong", f"what answers at {shown} is not MLflow", f"curl {shown}/version, and set MLFLOW_TRACKING_URI")
    if status == 403 and body.startswith(b"Invalid Host header"):
        # The variable takes the place of the server's own list.
        cure = f"start the server with MLFLOW_SERVER_ALLOWED_HOSTS='{host},localhost:*,127.0.0.1:*'"
        return Finding("wrong", f"MLflow at {shown} refuses clients that call it {host} (403)", cure)
    if status in (401, 403):
        cure = "export MLFLOW_TRACKING_USERNAME=NAME MLFLOW_TRACKING_PASSWORD=PASSWORD"
        return Finding("wrong", f"MLflow at {shown} does not let us in ({status})", cure)
    if status == 407:
        return Finding("wrong", f"a proxy before {shown} asks who we are (407)", f"export NO_PROXY={host.rpartition(':')[0] or host}")
    return Finding("wrong", f"MLflow at {shown} answers {status}", LATER)


def _unreachable(shown: str, why: object) -> Finding:
    """A server that gave no answer."""
    if isinstance(why, ssl.SSLCertVerificationError):
        cure = "export MLFLOW_TRACKING_SERVER_CERT_PATH=ITS-AUTHORITY.pem"
        return Finding("wrong", f"the certificate of {shown} is not trusted ({why.verify_message})", cure)
    if isinstance(why, socket.gaierror):
        return Finding("wrong", f"MLflow's name does not resolve ({shown})", LATER)
    said = "no answer in time" if isinstance(why, TimeoutError) else getattr(why, "strerror", None) or type(why).__name__
    return Finding("wrong", f"MLflow cannot be reached at {shown} ({said})", LATER)
