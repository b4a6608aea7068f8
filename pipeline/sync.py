"""The sync command: what MLflow has not heard of yet is sent to it, and what copies of runs lack to object storage."""

import logging
from pathlib import Path

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
    code = 0
    configured()
    server_and_credentials(paths)
    journals = sorted(paths.runs.glob("*/journal.jsonl"))
    for journal in journals:
        try:
            error = mirrored(journal.parent, paths)
        except (MachineError, OSError) as refused:
            # The others may be sound.
            error = describe(refused, str(journal.parent)) if isinstance(refused, OSError) else str(refused)
            log.info("%s", error)
        code = MachineError.exit_code if error else code
        if error and UNANSWERED in error:
            # Nor will it answer for the others.
            break
    # Also where MLflow is deaf: it is another server.
    lacking = [journal for journal in journals if _copied(journal.parent)]
    return MachineError.exit_code if lacking else code


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


def mirrored(run: Path, paths: Paths, patient: bool = True) -> str | None:
    """Send what MLflow does not have of one run; returns an error or None."""
    if not needs_sync(run, paths):
        return None
    log.info("%s: sending what MLflow has not heard of", run.name)
    try:
        with run_lock(run / "lock"):
            error = MirrorProcess(run, paths, patient).wait()
    except MachineError as running:
        # It has a mirror of its own.
        log.info("%s", running)
        return None
    log.info("%s: %s", run.name, error or "MLflow has all of it")
    return error
