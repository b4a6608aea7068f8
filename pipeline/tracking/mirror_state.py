"""How far a run is mirrored: written down by its mirror, read by whoever starts one."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.files import atomic_write, locked

LOCK = "mirror.lock"
# How requests and urllib3 say it, in a sentence of 500 characters.
UNANSWERED = "does not answer"
UNREACHED = re.compile(r"HTTPS?Connection(?:Pool)?\(host='([^']+)', port=(\d+)\)")
REASON = re.compile(r"Connection refused|[Tt]imed out|Name or service not known|Temporary failure in name resolution|No route to host")


@dataclass(frozen=True)
class State:
    """How far a run is mirrored: MLflow's id of it, the place in the journal, and what went wrong last."""

    run_id: str = ""
    experiment_id: str = ""
    offset: int = 0
    error: str | None = None
    # Which MLflow it is: a digest, as an address may hold a password.
    server: str = ""
    # The registered model that an evaluation made, as name/version.
    model: str = ""
    # The journal was sent from its beginning to a run that was there: MLflow is asked what it has.
    repeated: bool = False


def database_of(uri: str, folder: Path = Path()) -> Path | None:
    """Return the file of a local database, which may be relative to a folder; None for any other store."""
    local = uri.removeprefix("sqlite:///")
    return None if local == uri else folder / local


def read_state(run: Path) -> State:
    """Return what the mirror of a run has written down; of a damaged file nothing, as sending twice changes nothing."""
    try:
        state = State(**json.loads((run / "mirror.json").read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return State()
    strings = (state.run_id, state.experiment_id, state.server, state.model, state.error or "")
    sound = all(isinstance(one, str) for one in strings) and type(state.offset) is int and state.offset >= 0  # pyright: ignore
    return state if sound and type(state.repeated) is bool else State()


def write_state(run: Path, state: State) -> None:
    """Write it for the next mirror and for whoever waits for this one."""
    atomic_write(run / "mirror.json", json.dumps(asdict(state)).encode())


def repeat_if_cut(run: Path) -> None:
    """Have a journal repeated from its beginning if it is shorter than what was mirrored of it, before it grows again."""
    state = read_state(run)
    if state.offset > (run / "journal.jsonl").stat().st_size:
        write_state(run, replace(state, offset=0))


def server_id(uri: str) -> str:
    """Return the identifier of an MLflow server: a hash, since the address may contain a password."""
    return hashlib.sha256(uri.encode()).hexdigest()[:16]


def error_line(error: Exception) -> str:
    """Return an error in one line without an address, which may hold a password; common ones with their reason."""
    whole = re.sub(r"//[^/@\s]*@", "//", " ".join(str(error).split()))
    where, why = UNREACHED.search(whole), REASON.search(whole)
    # Behind a proxy nobody knows which of the two it was.
    if where and why and "ProxyError" not in whole:
        return f"the server at {where[1]}, port {where[2]}, {UNANSWERED}: {why[0].lower()}"
    text = whole[:300] or type(error).__name__
    if "403" in text:
        text += (
            "; the server lets only names in that it knows: start it with MLFLOW_SERVER_ALLOWED_HOSTS=<host>:<port>, or see its passwords"
        )
    return text


@contextlib.contextmanager
def sending(run: Path) -> Generator[None]:
    """Wait until no other mirror sends this run's journal, and tell which process does from here on."""
    with locked(run / LOCK):
        # A full disk may have no room for it.
        with contextlib.suppress(OSError):
            (run / LOCK).write_text(str(os.getpid()))
        yield


def sender(run: Path) -> int:
    """Return the process that sends it, or was the last to; 0 if nobody knows."""
    try:
        return int((run / LOCK).read_text())
    except (OSError, ValueError):
        return 0


def write_error(run: Path, error: str | None) -> None:
    """Write down what goes wrong now, or that nothing does."""
    state = read_state(run)
    if state.error != error:
        # A full disk may have no room for it.
        with contextlib.suppress(OSError):
            write_state(run, replace(state, error=error))
