"""MLflow's server for tests, and a proxy before it that is slow, deaf or a liar."""

import math
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from tests.kit.compose import free_port
from tests.kit.experiment import clean_environment


class Server:
    """A real one, with a store of its own that outlives it."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", artifacts: str = "", **environment: str):
        self._artifacts = artifacts or str(folder / "artifacts")
        self.folder, self.host, self.port, self._environment = folder, host, free_port(), environment
        folder.mkdir(exist_ok=True)

    @property
    def uri(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self, answers: int = 200) -> "Server":
        command = [sys.executable, "-m", "mlflow", "server", "--host", self.host, "--port", str(self.port), "--workers", "1"]
        store = ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}", "--artifacts-destination", self._artifacts]
        environment = clean_environment() | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"} | self._environment
        log = (self.folder / "server.log").open("a")
        self._process = subprocess.Popen([*command, *store], env=environment, stdout=log, stderr=log, start_new_session=True)
        log.close()
        until = time.monotonic() + 90
        while self._status() != answers:
            assert self._process.poll() is None and time.monotonic() < until, (self.folder / "server.log").read_text()[-2000:]
            time.sleep(0.2)
        return self

    def _status(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.uri}/api/2.0/mlflow/experiments/search?max_results=1", timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def kill(self) -> None:
        """With its workers, by SIGKILL."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.wait()


class Proxy:
    """Passes requests on to a server, unless its mode is another: slow (3 s each, or another time), hole, 500, liar.

    It takes as many bytes a second as it is told, and answers so many seconds after it has a large body.
    """

    def __init__(self, target: str, bytes_per_second: float = math.inf, late_seconds: float = 0.0):
        self.mode, self.slow_seconds, self.target, proxy = "pass", 3.0, target, self
        self.bytes_per_second, self.late_seconds, self.taken_bytes = bytes_per_second, late_seconds, 0
        # The processes that have asked.
        self.clients: set[int | None] = set()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

        for verb in ("GET", "POST", "PUT", "PATCH", "DELETE"):
            setattr(Handler, f"do_{verb}", lambda asked: proxy.answer(asked))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, asked: BaseHTTPRequestHandler) -> None:
        self.clients |= {one.pid for one in psutil.net_connections("tcp4") if one.laddr == asked.client_address}
        body = self._taken(asked, int(asked.headers.get("Content-Length") or 0))
        mode = self.mode
        if mode == "hole":
            time.sleep(300)
            return
        if mode == "slow":
            time.sleep(self.slow_seconds)
        told = {"500": (500, b"no", ""), "liar": (200, b"{}", "")}
        status, content, version = told[mode] if mode in told else self._passed_on(asked, body)
        asked.send_response(status)
        asked.send_header("Content-Type", "application/json")
        asked.send_header("Content-Length", str(len(content)))
        if version:
            asked.send_header("ETag", version)
        asked.end_headers()
        asked.wfile.write(content)

    def _taken(self, asked: BaseHTTPRequestHandler, size_bytes: int) -> bytes:
        """The body of a request; where bytes are counted, read in pieces, and not on in a hole."""
        body = bytearray()
        while len(body) < size_bytes and not (body and self.mode == "hole"):
            piece = min(size_bytes - len(body), 1 << 16 if self.bytes_per_second < math.inf else size_bytes)
            body += asked.rfile.read(piece)
            self.taken_bytes += piece
            time.sleep(piece / self.bytes_per_second)
        if size_bytes > 1 << 20:
            time.sleep(self.late_seconds)
        return bytes(body)

    def _passed_on(self, asked: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes, str]:
        # urllib would call a body without a type a form.
        headers = {"Content-Type": "application/octet-stream"}
        headers |= {name: value for name, value in asked.headers.items() if name.lower() not in ("host", "content-length", "expect")}
        request = urllib.request.Request(f"{self.target}{asked.path}", data=body or None, headers=headers, method=asked.command)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read(), answer.headers.get("ETag", "")
        except urllib.error.HTTPError as error:
            return error.code, error.read(), ""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
