"""The mirror as a process of ours: start it, learn the run's id from it, let it finish."""

import os
import subprocess
import sys
import time
from pathlib import Path

from pipeline.files import Paths
from pipeline.tracking.mirror import read_state

# How late an end may be because of MLflow: while it answers, and when it does not.
PATIENCE_SECONDS, DEAF_SECONDS = 120, 10
QUICK_TO_FAIL = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_ENABLE_ASYNC_LOGGING": "false"}


def tracking_uri(paths: Paths) -> str:
    """Where runs are recorded: what the environment says, else a database beside the params file."""
    named = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    local = named.removeprefix("sqlite:///")
    # A relative path would be another database in every folder, such as those of DVC's temporary experiments.
    return named if local == named else f"sqlite:///{paths.home / local}"


def address(run: Path, paths: Paths) -> str:
    """Where people see the run."""
    state, uri = read_state(run), tracking_uri(paths)
    page = f"#/experiments/{state.experiment_id}/runs/{state.run_id}"
    if uri.startswith("http"):
        # In containers the server has one name for them and another for people.
        return f"{(os.environ.get('LOCKSTEP_UI') or uri).rstrip('/')}/{page}"
    return f"http://127.0.0.1:5000/{page} (after: make ui)"


class MirrorProcess:
    """Mirrors one run until it is told that the journal is complete."""

    def __init__(self, run: Path, paths: Paths):
        (run / "logs").mkdir(parents=True, exist_ok=True)
        self._run = run
        with (run / "logs" / "mirror.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.tracking.mirror", str(run)],
                cwd=Path(__file__).parents[2],
                env=os.environ | QUICK_TO_FAIL | {"MLFLOW_TRACKING_URI": tracking_uri(paths)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def run_id(self) -> str | None:
        """MLflow's id of the run, once it has one; None where it cannot be had now."""
        until = time.monotonic() + DEAF_SECONDS
        while time.monotonic() < until:
            state = read_state(self._run)
            if state.run_id or state.error or self._process.poll() is not None:
                return state.run_id or None
            time.sleep(0.1)
        return None

    def finish(self, patience_seconds: float = PATIENCE_SECONDS) -> str | None:
        """Close the journal and wait while the mirror gets on; what went wrong, or None."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        state, since = read_state(self._run), time.monotonic()
        while self._process.poll() is None:
            before, state = state, read_state(self._run)
            since = time.monotonic() if state.offset != before.offset else since
            if time.monotonic() - since > (DEAF_SECONDS if state.error else patience_seconds):
                self._process.kill()
                self._process.wait()
            time.sleep(0.05)
        if self._process.returncode == 0:
            return None
        return read_state(self._run).error or f"the mirror ended with {self._process.returncode}; see {self._run / 'logs' / 'mirror.log'}"
