"""The sync command: what MLflow has not heard of yet is sent to it, and what copies of runs lack to object storage."""

import logging
from pathlib import Path
from threading import Event

from pipeline.config import Config, MachineError
from pipeline.files import Paths, describe
from pipeline.runs import copy, copy_process
from pipeline.runs.lock import run_lock
from pipeline.runs.object_storage import configured
from pipeline.tracking.mirror_process import MirrorProcess, needs_sync, server_and_credentials
from pipeline.tracking.mirror_state import UNANSWERED

log = logging.getLogger(__name__)


def run(config: Config, paths: Paths) -> int:
    """Mirror every journal to its end, and complete the copies; 4 if one could not be taken."""
    configured()
    server_and_credentials(paths)
    journals = sorted(paths.runs.glob("*/journal.jsonl"))
    code = 0 if send([journal.parent for journal in journals], paths) else MachineError.exit_code
    # Also where MLflow is deaf: it is another server.
    lacking = [journal for journal in journals if _copied(journal.parent)]
    return MachineError.exit_code if lacking else code


def send(runs: list[Path], paths: Paths, hurried: Event | None = None) -> bool:
    """Send what MLflow does not have of some runs; returns True if it has all.

    With `hurried`, only for as long as it takes what it is sent, and until that is set.
    """
    complete = True
    for run in runs:
        try:
            error = _mirrored(run, paths, hurried)
        except (MachineError, OSError) as refused:
            # The others may be sound.
            error = describe(refused, str(run)) if isinstance(refused, OSError) else str(refused)
            log.info("%s", error)
        complete = complete and not error
        if error and (hurried or UNANSWERED in error):
            # Nor will it answer for the others; and whoever is hurried waits for no second error.
            break
    return complete


def _copied(run: Path) -> str | None:
    """Send what the copy of one run lacks; returns an error or None."""
    if not copy.is_incomplete(run):
        return None
    try:
        with run_lock(run / "lock"):
            return copy_process.complete(run, log.info)
    except MachineError:
        # It runs, and sends its copy itself.
        return None


def _mirrored(run: Path, paths: Paths, hurried: Event | None) -> str | None:
    """Send what MLflow does not have of one run; returns an error or None."""
    if not needs_sync(run, paths):
        return None
    log.info("%s: sending what MLflow has not heard of", run.name)
    try:
        with run_lock(run / "lock"):
            mirror = MirrorProcess(run, paths, patient=hurried is None)
            error = mirror.finish(hurried, log.info) if hurried else mirror.wait()
    except MachineError as running:
        # It has a mirror of its own.
        log.info("%s", running)
        return None
    log.info("%s: %s", run.name, error or "MLflow has all of it")
    return error
