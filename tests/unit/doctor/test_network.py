"""What is asked of names, ports and MLflow, with real sockets and servers."""

import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from pipeline.doctor import network
from pipeline.hardware.network import listen
from tests.kit.experiment import clean_environment


@contextmanager
def listening(address: str = "127.0.0.1", port: int = 0) -> Generator[int]:
    """A server that takes connections and never says a word."""
    with socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        yield server.getsockname()[1]


class Answers(BaseHTTPRequestHandler):
    """Answers /401/… with 401, and all else like a server of JSON; keeps what it heard."""

    def do_GET(self) -> None:
        self.server.heard = (self.headers["Host"], self.headers["Authorization"])  # type: ignore[attr-defined]
        asked = re.match(r"/(\d{3})/", self.path)
        self.send_response(int(asked[1]) if asked else 200)
        self.end_headers()
        self.wfile.write(b"<html>" if asked else b"{}")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def answering(certificate: Path | None = None) -> Generator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_port_that_is_taken_on_one_address_is_taken_and_the_other_one_is_free() -> None:
    # Also ::1, where this machine has it.
    here = [one.address for one in psutil.net_if_addrs()["lo"] if one.family in (socket.AF_INET, socket.AF_INET6)]
    for address in ("0.0.0.0", *here):
        with listening(address) as taken:
            found = network.port(taken)
            assert found.kind == "wrong"
            (free,) = {int(port) for port in re.findall(r"(?:--port |:)(\d+)", found.cure)}
            listen(free).close()
        assert network.port(taken).kind == "ok"


def test_a_name_of_this_machine_that_does_not_resolve_is_wrong() -> None:
    found = network.own_name("no-such-machine.invalid")
    assert found.kind == "wrong"
    assert found.cure == 'echo "127.0.1.1 no-such-machine.invalid" | sudo tee -a /etc/hosts'
    assert network.own_name("localhost").kind == "ok"


def test_a_leader_is_found_with_the_way_to_it_or_told_why_not() -> None:
    with listening() as there:
        found = network.leader("127.0.0.1", there)
        assert (found.kind, found.text) == ("ok", f"the leader 127.0.0.1:{there} answers; from here through lo as 127.0.0.1")
    found = network.leader("127.0.0.1", there)
    assert (found.kind, found.cure) == ("wrong", f"on 127.0.0.1: python -m pipeline lead --port {there} dvc repro")
    found = network.leader("no-such-machine.invalid", there)
    assert found.kind == "wrong"
    assert "/etc/hosts" in found.cure


def test_a_leader_that_does_not_answer_costs_two_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        started_at = time.monotonic()
        found = network.leader(*full.getsockname())
        assert time.monotonic() - started_at < 2.5
        assert (found.kind, found.cure) == ("wrong", f"on 127.0.0.1: sudo ufw allow {full.getsockname()[1]}/tcp")


def test_what_keeps_mlflow_from_taking_runs_is_told() -> None:
    with answering() as server:
        here = f"http://127.0.0.1:{server.server_address[1]}"
        assert network.mlflow(here) == network.Finding("ok", f"MLflow answers at {here}")
        for status, words in (
            (200, "is not MLflow"),
            (401, "let us in"),
            (403, "let us in"),
            (407, "NO_PROXY=127.0.0.1"),
            (503, "answers 503"),
        ):
            found = network.mlflow(f"{here}/{status}")
            assert found.kind == "wrong"
            assert words in str(found)
    for uri, words in {
        here: "Connection refused",
        "http://no-such-machine.invalid:5000": "does not resolve",
        "http://me:12/34@there:5000": "percent-encode",
        "file:///srv/mlruns": "unset MLFLOW_TRACKING_URI",
        "sqlite:////srv/no/such/folder/mlflow.db": "mkdir -p /srv/no/such/folder",
    }.items():
        found = network.mlflow(uri)
        assert found.kind == "wrong"
        assert words in str(found)
        assert "34" not in found.text.replace(here, "")


def test_a_certificate_of_ones_own_is_trusted_only_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = tmp_path / "both.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make, "-keyout", both, "-out", tmp_path / "certificate.pem"], check=True, capture_output=True)
    with both.open("a") as file:
        file.write((tmp_path / "certificate.pem").read_text())
    with answering(both) as server:
        uri = f"https://localhost:{server.server_address[1]}"
        assert "export MLFLOW_TRACKING_SERVER_CERT_PATH" in network.mlflow(uri).cure
        with monkeypatch.context() as careless:
            careless.setenv("MLFLOW_TRACKING_INSECURE_TLS", "true")
            assert network.mlflow(uri).kind == "ok"
        monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(tmp_path / "certificate.pem"))
        assert network.mlflow(uri).kind == "ok"


@pytest.mark.slow
def test_a_real_server_hears_what_its_own_client_says_and_a_refused_name_is_cured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.server.security_utils import get_allowed_hosts_from_env, is_allowed_host_header
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    with listening() as port:
        pass
    variables = clean_environment() | {"MLFLOW_SERVER_ALLOWED_HOSTS": f"127.0.0.1:{port}"}
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 120
        while network.mlflow(f"http://127.0.0.1:{port}").kind != "ok":
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.5)
        found = network.mlflow(f"http://localhost:{port}")
    finally:
        process.terminate()
        process.wait(30)
    assert (found.kind, found.text) == ("wrong", f"MLflow at http://localhost:{port} refuses clients that call it localhost:{port} (403)")
    allowed = re.findall(r"MLFLOW_SERVER_ALLOWED_HOSTS='(.+)'", found.cure)[0]
    assert f"localhost:{port}" in allowed.split(",")
    monkeypatch.setenv("MLFLOW_SERVER_ALLOWED_HOSTS", allowed)
    assert is_allowed_host_header(get_allowed_hosts_from_env() or [], f"127.0.0.1:{port}")
    with answering() as server:
        there = f"{server.server_address[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
        for uri in (f"http://LocalHost:{there}/", f"http://you:p%40ss@127.0.0.1:{there}"):
            assert network.mlflow(uri).kind == "ok"
            ours = server.heard  # type: ignore[attr-defined]
            http_request(get_default_host_creds(uri), "/api", "GET")
            assert ours == server.heard  # type: ignore[attr-defined]
