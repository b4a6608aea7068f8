"""One start of ranks for a stage: under the run's lock, with journal, mirror and an ending that is written down."""

import json
import os
import shlex
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config import Config, MachineError
from pipeline.files import Paths, write_whole
from pipeline.job import Job
from pipeline.launch import outcome, torchrun
from pipeline.launch.mirroring import MirrorProcess, address
from pipeline.launch.progress import Progress
from pipeline.launch.torchrun import Failure
from pipeline.tracking import journal as journals
from pipeline.tracking.journal import Journal

Publish = Callable[[Journal, str | None], str]


class Work:
    """What every stage with ranks does around them."""

    def __init__(self, stage: str, job: Job, paths: Paths, lock: int):
        self._stage, self._job, self._paths, self._lock = stage, job, paths, lock
        by_hand = f"python -m pipeline {stage} --params {shlex.quote(str(paths.params))}"
        self.command = "dvc repro" if torchrun.dvc_above() else by_hand

    def run(self, module: str, opening: dict[str, Any], tags: dict[str, Any], progress: Progress, publish: Publish) -> int:
        """Start the ranks and see them to their end; `publish`, given MLflow's run id, says in a line what came of it."""
        job, run = self._job, self._job.run
        file = run / f"{self._stage}.json"
        write_whole(file, job.model_dump_json().encode())
        journal = Journal(job.journal)
        if not journals.last(job.journal, "run"):
            journal.event("run", **({"id": uuid.uuid4().hex} | opening))
        named = {name: str(value) for name, value in tags.items() if value is not None}
        journal.event("started", stage=self._stage, tags=named)
        step = journals.last(job.journal, "metrics").get("step", 0)
        outcome.running(run, step, newest_checkpoint(run), self.command)
        mirror = MirrorProcess(run, self._paths)
        started_at = time.monotonic()
        with progress:
            tell = self._teller(progress)
            watch = torchrun.run(module, file, job.config.dist, self._lock, tell, progress.tick)
        journal.event("left", stage=self._stage, elapsed_seconds=time.monotonic() - started_at)
        end = outcome.judge(watch, run, newest_checkpoint(run), self.command)
        said = outcome.message(end)
        if end.exit_code == 0:
            try:
                said = publish(journal, mirror.run_id())
            except (OSError, MachineError) as error:
                end = outcome.unpublished(end, error, self.command)
                said = outcome.message(end)
        progress.say(said)
        journal.event("ended", stage=self._stage, outcome=end.outcome, cause=end.cause)
        journal.close()
        end.write(run)
        wrong = mirror.finish()
        if wrong is None:
            progress.say(f"MLflow: {address(run, self._paths)}")
        else:
            cure = f"python -m pipeline sync --params {shlex.quote(str(self._paths.params))}"
            progress.say(f"MLflow does not have all of it yet ({wrong}). To catch up: {cure}")
        assert end.exit_code is not None
        return end.exit_code

    def _teller(self, progress: Progress) -> Callable[[Failure], None]:
        """Says of every failure what happened and what becomes of it."""

        def tell(failure: Failure) -> None:
            if failure.exit_code in torchrun.FINAL_EXITS or failure.attempt >= torchrun.MAX_RESTARTS:
                return
            step = journals.last(self._job.journal, "metrics").get("step", 0)
            source = newest_checkpoint(self._job.run) or "the beginning"
            count = f"restart {failure.attempt + 1} of {torchrun.MAX_RESTARTS}"
            progress.say(f"{outcome.describe(failure)} after step {step}; starting again from {source} ({count})")

        return tell


def newest_checkpoint(run: Path) -> str | None:
    """The file a run would resume from."""
    index = run / "checkpoints" / "index.json"
    entries = json.loads(index.read_text())["checkpoints"] if index.exists() else []
    return str(run / "checkpoints" / entries[-1]["file"]) if entries else None


def opening(config: Config, paths: Paths, name: str) -> dict[str, Any]:
    """The first line of a journal: all that MLflow needs to create its run."""
    params = {f"{section}.{key}": value for section, values in config.model_dump(exclude={"seed"}).items() for key, value in values.items()}
    return {
        "experiment": config.tracking.experiment,
        "artifacts": (paths.home / "mlartifacts").as_uri(),
        "name": name,
        "params": {"seed": config.seed} | params,
        "tags": {"mlflow.source.name": "pipeline", "mlflow.user": os.environ.get("USER", "unknown")},
    }
