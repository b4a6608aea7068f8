"""The sync command: what MLflow has not heard of yet is sent to it."""

import logging
import math

from pipeline.config import Config, MachineError
from pipeline.files import Paths
from pipeline.runs.lock import run_lock
from pipeline.tracking.mirror_process import MirrorProcess, is_behind
from pipeline.tracking.mirror_state import UNANSWERED

log = logging.getLogger(__name__)


def run(config: Config, paths: Paths) -> int:
    """Mirror every journal to its end; 4 if MLflow could not take one."""
    code = 0
    for journal in sorted(paths.runs.glob("*/journal.jsonl")):
        run = journal.parent
        if not is_behind(run, paths):
            continue
        log.info("%s: sending what MLflow has not heard of", run.name)
        try:
            with run_lock(run / "lock"):
                wrong = MirrorProcess(run, paths, patient=True).finish(math.inf)
        except MachineError as error:
            log.info("%s", error)
            continue
        log.info("%s: %s", run.name, wrong or "MLflow has all of it")
        code = MachineError.exit_code if wrong else code
        if wrong and UNANSWERED in wrong:
            # Nor will it to the others.
            break
    return code
