"""The mirror as a child process: start it, read the run's id from its state, wait for its end."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from urllib.parse import unquote, urlsplit

import psutil

from pipeline.config import ConfigError
from pipeline.files import Paths
from pipeline.tracking.experiment_page import WORKFLOW
from pipeline.tracking.journal import last
from pipeline.tracking.mirror_state import database_of, read_state, sender, server_id, write_error
from pipeline.tracking.uploads import ANSWERS

MIRROR = "pipeline.tracking.mirror"
# How late MLflow may make an end: by a server that takes nothing, and by one that goes on taking.
DEAF_SECONDS, RECEIVING_SECONDS = 8.0, 600.0
# After a stop request, also where a busy machine lets the mirror, which runs at nice 19, do nothing.
STOPPED_SECONDS = 40.0
# How long publishing may wait for MLflow's id of the run, whatever the mirror does.
RUN_ID_SECONDS = 30
# What an upload must get on by in that time to be one; certificates and the like are read too.
PROGRESS_BYTES = 1 << 19
# A user who waits for `sync` can say it again: MLflow's own seven retries, of two minutes each, are too many.
PATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
QUICK_TO_FAIL = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_ENABLE_ASYNC_LOGGING": "false"}


def tracking_uri(paths: Paths) -> str:
    """Return where runs are recorded: what the environment says, else a database beside the params file."""
    named = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    store = database_of(named, paths.home)
    # A relative path would be another database in every folder, such as those of DVC's temporary experiments.
    return f"sqlite:///{store}" if store else named


def without_credentials(uri: str) -> tuple[str, dict[str, str]]:
    """Return a server's address without name and password, which MLflow would repeat in every message, and the variables that give both.

    Raises ValueError if the address cannot be parsed.
    """
    scheme, _, rest = uri.partition("://")
    if scheme.lower() not in ("http", "https"):
        return uri, {}
    both, at, server = rest.rpartition("@")
    if not _is_host_and_port(server):
        # An @ in the path. A host and port behind it are what follows a password with a slash in it.
        authority, slash, path = rest.partition("/")
        both, at, server = authority.rpartition("@")
        server += slash + path
    parts = urlsplit(f"{scheme}://{server}")
    # Reading the port raises ValueError if it is not a number.
    if not parts.hostname or parts.port == 0:
        raise ValueError("no host")
    if not at:
        return parts.geturl(), {}
    name, _, password = both.partition(":")
    return parts.geturl(), {"MLFLOW_TRACKING_USERNAME": unquote(name), "MLFLOW_TRACKING_PASSWORD": unquote(password)}


def _is_host_and_port(server: str) -> bool:
    return re.fullmatch(r"[^/?#]+:\d+", server.partition("/")[0]) is not None


def server_and_credentials(paths: Paths) -> tuple[str, dict[str, str]]:
    """Return the same of the experiment's MLflow; raises ConfigError, without the address, which may hold a password."""
    try:
        return without_credentials(tracking_uri(paths))
    except ValueError:
        cure = "percent-encode its name and password, as in http://me:p%40ss@host:5000"
        raise ConfigError(f"MLFLOW_TRACKING_URI: is not an address; {cure}") from None


def address(run: Path, paths: Paths, with_model: bool = False) -> str:
    """Return where people see the run, and, once it is evaluated, by what name a program loads its model."""
    model = read_state(run).model if with_model else ""
    return _page(run, paths) + (f"; its model: models:/{model}" if model else "")


def _page(run: Path, paths: Paths) -> str:
    state, (uri, _) = read_state(run), server_and_credentials(paths)
    page = f"#/experiments/{state.experiment_id}/runs/{state.run_id}?{WORKFLOW}"
    if uri.startswith("http"):
        # In containers the server has one name for them and another for people.
        return f"{(os.environ.get('LOCKSTEP_UI') or uri).rstrip('/')}/{page}"
    store = database_of(uri)
    if store is None or store.name != "mlflow.db":
        # Another kind of database is named by what may hold its password.
        named = shlex.quote(uri) if store else "$MLFLOW_TRACKING_URI"
        return f"http://127.0.0.1:5000/{page} (after: mlflow server --backend-store-uri {named})"
    here = Path.cwd()
    folder = store.parent.relative_to(here) if store.is_relative_to(here) else store.parent
    return f"http://127.0.0.1:5000/{page} (after: make ui{'' if folder == Path() else f' IN={shlex.quote(str(folder))}'})"


def needs_sync(run: Path, paths: Paths) -> bool:
    """Return True unless MLflow is known to have all of a run's journal."""
    state, (uri, _) = read_state(run), server_and_credentials(paths)
    complete = state.offset == (run / "journal.jsonl").stat().st_size and state.server == server_id(uri) and not state.error
    return not complete or last(run / "journal.jsonl", "started", "ended").get("kind") != "ended"


class MirrorProcess:
    """Mirrors one run until it is told that the journal is complete."""

    def __init__(self, run: Path, paths: Paths, patient: bool = False):
        (run / "logs").mkdir(parents=True, exist_ok=True)
        self._run = run
        # An earlier mirror's error is no news.
        write_error(run, None)
        uri, credentials = server_and_credentials(paths)
        self._server = server_id(uri)
        self._answers, writer = os.pipe()
        os.set_blocking(self._answers, False)
        os.set_blocking(writer, False)
        with (run / "logs" / "mirror.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MIRROR, str(run)],
                cwd=Path(__file__).parents[2],
                env=(PATIENT if patient else QUICK_TO_FAIL) | os.environ | credentials | {"MLFLOW_TRACKING_URI": uri, ANSWERS: str(writer)},
                pass_fds=(writer,),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        os.close(writer)
        self._progress = (0, 0)
        self._deaf_seconds = 0.0

    def run_id(self, hurried: Event) -> str | None:
        """Return MLflow's id of the run, once it has one; None if it cannot be had now."""
        until = time.monotonic() + RUN_ID_SECONDS
        while self._is_worth_waiting() and not hurried.is_set() and time.monotonic() < until:
            state = read_state(self._run)
            if state.error or (state.run_id and state.server == self._server):
                return state.run_id if state.server == self._server else None
        return None

    def finish(self, hurried: Event, announce: Callable[[str], None], stopped: bool = False) -> str | None:
        """Close the journal and wait for the mirror while its server takes what it sends; returns an error or None.

        After a stop request the whole wait for the server is short: whoever asked may kill this process soon.
        """
        started_at, announced = time.monotonic(), False
        self._close()
        while self._is_worth_waiting(counts_progress=not stopped) and not hurried.is_set():
            waited_seconds = time.monotonic() - started_at
            if waited_seconds > (STOPPED_SECONDS if stopped else RECEIVING_SECONDS):
                break
            if waited_seconds > DEAF_SECONDS and not (announced or stopped):
                announce(f"MLflow is still receiving; waiting for it, for {RECEIVING_SECONDS:.0f} s at most")
                announced = True
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            deaf = f"the server has not answered in {self._deaf_seconds:.0f} s"
            receiving = f"the server was still receiving after {time.monotonic() - started_at:.0f} s"
            write_error(self._run, read_state(self._run).error or (deaf if self._deaf_seconds > DEAF_SECONDS else receiving))
        os.close(self._answers)
        return self._error()

    def wait(self) -> str | None:
        """Close the journal and wait for the mirror, however long it takes; returns an error or None."""
        self._close()
        self._process.wait()
        os.close(self._answers)
        return self._error()

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _error(self) -> str | None:
        if self._process.returncode == 0:
            return None
        return read_state(self._run).error or f"the mirror ended with {self._process.returncode}; see {self._run / 'logs' / 'mirror.log'}"

    def _is_worth_waiting(self, counts_progress: bool = True) -> bool:
        """Wait a moment; returns False once the mirror has ended, or has slept for DEAF_SECONDS since it last got on."""
        if self._process.poll() is not None or self._deaf_seconds > DEAF_SECONDS:
            return False
        before = time.monotonic()
        time.sleep(0.05)
        with contextlib.suppress(psutil.NoSuchProcess):
            progress = (read_state(self._run).offset, self._read_bytes())
            got_on = progress[0] != self._progress[0] or abs(progress[1] - self._progress[1]) > PROGRESS_BYTES
            if counts_progress and (self._was_answered() or got_on):
                self._progress, self._deaf_seconds = progress, 0.0
            elif self._sender().status() == psutil.STATUS_SLEEPING:
                # On a busy machine a moment is longer.
                self._deaf_seconds += time.monotonic() - before
        return True

    def _sender(self) -> psutil.Process:
        """The mirror; or the one of an earlier start, while that still sends and the mirror waits for its end."""
        with contextlib.suppress(ValueError, OverflowError, psutil.Error):
            earlier = psutil.Process(sender(self._run))
            # A number may belong to another process by now.
            if earlier.cmdline()[-2:] == [MIRROR, str(self._run)]:
                return earlier
        return psutil.Process(self._process.pid)

    def _was_answered(self) -> bool:
        """Return True if a server has answered the mirror since the last call."""
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._answers, 1 << 16))
        return False

    def _read_bytes(self) -> int:
        """Return how much the mirror has read: in an upload, how much of the file it has sent."""
        # macOS keeps no such count: there, an upload of more than DEAF_SECONDS is left to `sync`.
        with contextlib.suppress(AttributeError, RuntimeError, psutil.Error):
            return int(self._sender().io_counters().read_chars)  # pyright: ignore[reportAttributeAccessIssue]
        return 0
