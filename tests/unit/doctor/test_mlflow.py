"""Checks of MLflow's store, with real servers."""

import re
import ssl
import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.doctor import mlflow
from pipeline.doctor.finding import Finding
from tests.kit.servers import Server
from tests.unit.doctor.test_network import listening


class Answers(BaseHTTPRequestHandler):
    """Answers /401/… with 401, and all else with JSON; keeps the headers of the last request."""

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


def test_what_keeps_mlflow_from_taking_runs_is_found() -> None:
    with answering() as server:
        here = f"http://127.0.0.1:{server.server_address[1]}"
        assert mlflow.store(here) == Finding("ok", f"MLflow answers at {here}")
        for status, words in (
            (200, "is not MLflow"),
            (401, "denies access"),
            (403, "denies access"),
            (407, "NO_PROXY=127.0.0.1"),
            (503, "answers 503"),
        ):
            found = mlflow.store(f"{here}/{status}")
            assert found.kind == "wrong"
            assert words in str(found)
    with listening() as silent:
        closed = f"(the server at 127.0.0.1, port {here.split(':')[2]}, does not answer: connection refused)"
        for uri, words in {
            here: f"MLflow cannot be reached at {here} {closed}",
            f"http://127.0.0.1:{silent}": f"port {silent}, does not answer: timed out",
            "http://no-such-machine.invalid:5000": "does not answer: name or service not known",
            "http://me:12/34@there:5000": "percent-encode",
            "http://me:1234@there:port": "percent-encode",
            "http://": "percent-encode",
            "file:///srv/mlruns": "unset MLFLOW_TRACKING_URI",
            "sqlite:////srv/no/such/folder/mlflow.db": "mkdir -p /srv/no/such/folder",
        }.items():
            found = mlflow.store(uri)
            assert found.kind == "wrong"
            assert words in str(found)
            assert not re.search(r"(12/)?34\b", found.text.replace(here, "").replace(str(silent), ""))


def test_a_certificate_of_ones_own_is_trusted_only_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = tmp_path / "both.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make, "-keyout", both, "-out", tmp_path / "certificate.pem"], check=True, capture_output=True)
    with both.open("a") as file:
        file.write((tmp_path / "certificate.pem").read_text())
    with answering(both) as server:
        uri = f"https://localhost:{server.server_address[1]}"
        found = mlflow.store(uri)
        assert "certificate verify failed" in found.text
        assert "export MLFLOW_TRACKING_SERVER_CERT_PATH" in found.fix
        with monkeypatch.context() as careless:
            careless.setenv("MLFLOW_TRACKING_INSECURE_TLS", "true")
            assert mlflow.store(uri).kind == "ok"
        monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(tmp_path / "certificate.pem"))
        assert mlflow.store(uri).kind == "ok"


@pytest.mark.slow
def test_a_real_server_hears_what_its_own_client_says_and_the_fix_for_a_refused_name_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.server.security_utils import get_allowed_hosts_from_env, is_allowed_host_header
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    real = Server(tmp_path / "server", MLFLOW_SERVER_ALLOWED_HOSTS="127.0.0.1:*")
    try:
        assert mlflow.store(real.start().uri) == Finding("ok", f"MLflow answers at {real.uri}")
        found = mlflow.store(f"http://localhost:{real.port}")
    finally:
        real.kill()
    name = f"localhost:{real.port}"
    assert (found.kind, found.text) == ("wrong", f"MLflow at http://{name} rejects the Host header {name} (403)")
    allowed = re.findall(r"MLFLOW_SERVER_ALLOWED_HOSTS='(.+)'", found.fix)[0]
    assert name in allowed.split(",")
    monkeypatch.setenv("MLFLOW_SERVER_ALLOWED_HOSTS", allowed)
    assert is_allowed_host_header(get_allowed_hosts_from_env() or [], f"127.0.0.1:{real.port}")
    with answering() as server:
        there = f"{server.server_address[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "sécret")
        for uri in (f"http://LocalHost:{there}/", f"http://you:p%40ss@127.0.0.1:{there}"):
            assert mlflow.store(uri).kind == "ok"
            ours = server.heard  # type: ignore[attr-defined]
            http_request(get_default_host_creds(uri), "/api", "GET")
            assert ours == server.heard  # type: ignore[attr-defined]
