"""How far a run is mirrored: written down by its mirror, read by whoever starts one."""

import contextlib
import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.files import atomic_write

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


def read_state(run: Path) -> State:
    """What the mirror of a run has written down; damaged, it is as good as none, as sending twice changes nothing."""
    try:
        return State(**json.loads((run / "mirror.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return State()


def write_state(run: Path, state: State) -> None:
    """Write it down."""
    atomic_write(run / "mirror.json", json.dumps(asdict(state)).encode())


def server_of(uri: str) -> str:
    """By what a state knows its MLflow."""
    return hashlib.sha256(uri.encode()).hexdigest()[:16]


def explained(error: Exception) -> str:
    """What went wrong, in a line without an address, which may hold a password; of what users meet most, why."""
    whole = re.sub(r"//[^/@\s]*@", "//", " ".join(str(error).split()))
    where, why = UNREACHED.search(whole), REASON.search(whole)
    # Behind a proxy nobody knows which of the two it was.
    if where and why and "ProxyError" not in whole:
        return f"the server at {where[1]}, port {where[2]}, {UNANSWERED}: {why[0].lower()}"
    said = whole[:300] or type(error).__name__
    if "403" in said:
        said += (
            "; the server lets only names in that it knows: start it with MLFLOW_SERVER_ALLOWED_HOSTS=<host>:<port>, or see its passwords"
        )
    return said


def note(run: Path, error: str | None) -> None:
    """Say what goes wrong, or that nothing does so far."""
    state = read_state(run)
    if state.error != error:
        # On a full disk there is no room for it, and the log may have some.
        with contextlib.suppress(OSError):
            write_state(run, replace(state, error=error))
