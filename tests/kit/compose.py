"""Compose on a clone that belongs to a user who is not root."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.kit.experiment import whole

USER = 1234
# One for each worker of pytest: `make up` and `--build` give the name to another image.
IMAGE = "lockstep-test" + os.environ.get("PYTEST_XDIST_WORKER", "")


def sh(*words: str, expect: int | None = 0, **options: Any) -> str:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert expect is None or done.returncode == expect, f"{' '.join(words)}: {done.returncode}\n{done.stdout}"
    return done.stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


class Project:
    """A clone that belongs to another user, and Compose on it."""

    def __init__(self, folder: Path, clean: dict[str, str], *files: str):
        self.folder, self.port, self.name = folder, free_port(), f"test{os.getpid()}-{folder.name}"
        self._files = ["docker-compose.yml", *files]
        self.environment = clean | {
            "UID": str(USER),
            "GID": str(USER),
            "LOCKSTEP_NAME": IMAGE,
            "MLFLOW_PORT": str(self.port),
            "MEMORY": "6g",
            "POSTGRES_PASSWORD": "secret",
        }

    def set(self, values: dict[str, Any]) -> "Project":
        # All keys: DVC misses those that a stage watches.
        (self.folder / "params.yaml").write_text(whole(values))
        return self

    def words(self, *words: str) -> list[str]:
        return ["docker", "compose", "--project-name", self.name, *(word for file in self._files for word in ("--file", file)), *words]

    def compose(self, *words: str, expect: int | None = 0, **environment: str) -> str:
        return sh(*self.words(*words), expect=expect, cwd=self.folder, env=self.environment | environment)

    def exit_codes(self) -> dict[str, int]:
        lines = self.compose("ps", "--all", "--format", "json").splitlines()
        return {one["Service"]: one["ExitCode"] for one in map(json.loads, lines) if one["State"] == "exited"}

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).split()[0]

    def wait(self, service: str, seconds: float = 300) -> int:
        until = time.monotonic() + seconds
        while service not in (codes := self.exit_codes()):
            assert time.monotonic() < until, self.compose("logs", "--tail=20")
            time.sleep(0.5)
        return codes[service]

    def wait_for_steps(self, count: int) -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            for journal in self.folder.glob("runs/*/journal.jsonl"):
                if journal.read_text().count("train/loss") >= count:
                    return
            time.sleep(0.1)
        raise AssertionError(self.compose("logs", "--tail=20"))

    def receipt(self) -> dict[str, Any]:
        return json.loads((self.folder / "models" / "receipt.json").read_text())

    def status(self) -> dict[str, Any]:
        (path,) = self.folder.glob("runs/*/status.json")
        return json.loads(path.read_text())

    def api(self, path: str, **asked: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/2.0/mlflow/{path}", headers={"Content-Type": "application/json"}
        )
        if asked:
            request.data = json.dumps(asked).encode()
        until = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return json.loads(answer.read())
            except (OSError, urllib.error.URLError):
                assert time.monotonic() < until
                time.sleep(0.5)

    def runs(self) -> list[dict[str, Any]]:
        ids = [one["experiment_id"] for one in self.api("experiments/search?max_results=100")["experiments"]]
        return self.api("runs/search", experiment_ids=ids).get("runs", [])
