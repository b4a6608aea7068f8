"""The sync command: what MLflow has not heard of yet is sent to it."""

import logging
from pathlib import Path

from pipeline.config import Config, MachineError
from pipeline.files import Paths, describe
from pipeline.runs.lock import run_lock
from pipeline.tracking.mirror_process import MirrorProcess, needs_sync, server_and_credentials
from pipeline.tracking.mirror_state import UNANSWERED

log = logging.getLogger(__name__)


def run(config: Config, paths: Paths) -> int:
    """Mirror every journal to its end; 4 if MLflow could not take one."""
    code = 0
    server_and_credentials(paths)
    for journal in sorted(paths.runs.glob("*/journal.jsonl")):
        try:
            error = _mirrored(journal.parent, paths)
        except (MachineError, OSError) as refused:
            # The others may be sound.
            error = describe(refused, str(journal.parent)) if isinstance(refused, OSError) else str(refused)
            log.info("%s", error)
        code = MachineError.exit_code if error else code
        if error and UNANSWERED in error:
            # Nor will it answer for the others.
            break
    return code


def _mirrored(run: Path, paths: Paths) -> str | None:
    """Send what MLflow does not have of one run; returns an error or None."""
    if not needs_sync(run, paths):
        return None
    log.info("%s: sending what MLflow has not heard of", run.name)
    try:
        with run_lock(run / "lock"):
            error = MirrorProcess(run, paths, patient=True).wait()
    except MachineError as running:
        # It has a mirror of its own.
        log.info("%s", running)
        return None
    log.info("%s: %s", run.name, error or "MLflow has all of it")
    return error
