"""The mirror as a process of ours: start it, learn the run's id from it, let it finish."""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote

import psutil

from pipeline.files import Paths
from pipeline.tracking.journal import last
from pipeline.tracking.mirror_state import note, read_state, server_of

# How late an end may be because of MLflow: for all that it waits for the server, and for what it does itself.
DEAF_SECONDS, BUSY_SECONDS = 8.0, 120.0
# A user who waits for `sync` can say it again: MLflow's own seven retries, of two minutes each, are too many.
PATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
QUICK_TO_FAIL = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_ENABLE_ASYNC_LOGGING": "false"}


def tracking_uri(paths: Paths) -> str:
    """Where runs are recorded: what the environment says, else a database beside the params file."""
    named = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    local = named.removeprefix("sqlite:///")
    # A relative path would be another database in every folder, such as those of DVC's temporary experiments.
    return named if local == named else f"sqlite:///{paths.home / local}"


def without_credentials(uri: str) -> tuple[str, dict[str, str]]:
    """A server's address without name and password, which MLflow would repeat in every message, and the variables that give it both."""
    scheme, _, rest = uri.partition("://")
    both, at, server = rest.rpartition("@")
    if not at or scheme.lower() not in ("http", "https"):
        return uri, {}
    name, _, password = both.partition(":")
    return f"{scheme}://{server}", {"MLFLOW_TRACKING_USERNAME": unquote(name), "MLFLOW_TRACKING_PASSWORD": unquote(password)}


def address(run: Path, paths: Paths) -> str:
    """Where people see the run."""
    state, (uri, _) = read_state(run), without_credentials(tracking_uri(paths))
    page = f"#/experiments/{state.experiment_id}/runs/{state.run_id}"
    if uri.startswith("http"):
        # In containers the server has one name for them and another for people.
        return f"{(os.environ.get('LOCKSTEP_UI') or uri).rstrip('/')}/{page}"
    folder = shlex.quote(str(paths.params.parent))
    return f"http://127.0.0.1:5000/{page} (after: make ui{'' if folder == '.' else f' IN={folder}'})"


def is_behind(run: Path, paths: Paths) -> bool:
    """Whether MLflow has not all of a run's journal yet, as far as is known."""
    state, (uri, _) = read_state(run), without_credentials(tracking_uri(paths))
    complete = state.offset == (run / "journal.jsonl").stat().st_size and state.server == server_of(uri) and not state.error
    return not complete or last(run / "journal.jsonl", "started", "ended").get("kind") != "ended"


class MirrorProcess:
    """Mirrors one run until it is told that the journal is complete."""

    def __init__(self, run: Path, paths: Paths, patient: bool = False):
        (run / "logs").mkdir(parents=True, exist_ok=True)
        self._run = run
        # What went wrong for an earlier one is no news.
        note(run, None)
        uri, credentials = without_credentials(tracking_uri(paths))
        self._server = server_of(uri)
        with (run / "logs" / "mirror.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.tracking.mirror", str(run)],
                cwd=Path(__file__).parents[2],
                env=(PATIENT if patient else QUICK_TO_FAIL) | os.environ | credentials | {"MLFLOW_TRACKING_URI": uri},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

        self._mirror = psutil.Process(self._process.pid)
        self._waited_seconds = 0.0

    def run_id(self) -> str | None:
        """MLflow's id of the run, once it has one; None where it cannot be had now."""
        while self._still():
            state = read_state(self._run)
            if state.error or (state.run_id and state.server == self._server):
                return state.run_id if state.server == self._server else None
        return None

    def finish(self, deaf_seconds: float = DEAF_SECONDS) -> str | None:
        """Close the journal and wait for the mirror, but for no server; what went wrong, or None."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        until = time.monotonic() + max(BUSY_SECONDS, deaf_seconds)
        while self._still(deaf_seconds) and time.monotonic() < until:
            pass
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            note(self._run, read_state(self._run).error or f"the server has not answered in {self._waited_seconds:.0f} s")
        if self._process.returncode == 0:
            return None
        return read_state(self._run).error or f"the mirror ended with {self._process.returncode}; see {self._run / 'logs' / 'mirror.log'}"

    def _still(self, deaf_seconds: float = DEAF_SECONDS) -> bool:
        """Whether there is any use in waiting on; a mirror that sleeps waits for its server."""
        if self._process.poll() is not None or self._waited_seconds > deaf_seconds:
            return False
        time.sleep(0.05)
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._mirror.status() == psutil.STATUS_SLEEPING:
                self._waited_seconds += 0.05
        return True
