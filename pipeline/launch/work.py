"""One start of ranks for a stage: under the run's lock, with journal, mirror and an ending that is written down."""

import shlex
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pipeline.config import Config, MachineError, PeerError
from pipeline.data import store
from pipeline.files import Paths, read_sealed
from pipeline.job import Job
from pipeline.launch import crew as crews
from pipeline.launch import machine, outcome, torchrun
from pipeline.launch.crew import Alone, Crew
from pipeline.launch.failure import Failure, Patience
from pipeline.launch.mirroring import MirrorProcess, address
from pipeline.launch.processes import dvc_above
from pipeline.launch.progress import Progress
from pipeline.tracking import journal as journals
from pipeline.tracking.journal import Journal

# Without a rank for so long: torchrun waits for an agent that was stopped, or that is lost.
IDLE_SECONDS, WAITING_SECONDS = 3, 10
Publish = Callable[[Journal, str | None], str]


class Work:
    """What every stage with ranks does around them."""

    def __init__(self, stage: Literal["train", "evaluate"], job: Job, paths: Paths, lock: int):
        self._stage: Literal["train", "evaluate"] = stage
        self._job, self._paths, self._lock = job, paths, lock
        by_hand = f"python -m pipeline {stage} --params {shlex.quote(str(paths.params))}"
        self.command = "dvc repro" if dvc_above() else by_hand

    def run(self, module: str, opening: dict[str, Any], tags: dict[str, Any], progress: Progress, publish: Publish) -> int:
        """Start the ranks and see them to their end; `publish`, given MLflow's run id, says in a line what came of it."""
        crew = crews.gather(self._stage, self._job, progress.say)
        try:
            return self._run(module, crew, self._opened(opening, tags), progress, publish)
        finally:
            crew.dismiss(PeerError.exit_code)

    def _opened(self, opening: dict[str, Any], tags: dict[str, Any]) -> Journal:
        """The journal, with the lines that begin a run and this start of it."""
        journal = Journal(self._job.journal)
        if not journals.last(self._job.journal, "run"):
            journal.event("run", **({"id": uuid.uuid4().hex} | opening))
        named = {name: str(value) for name, value in tags.items() if value is not None}
        journal.event("started", stage=self._stage, tags=named)
        return journal

    def _run(self, module: str, crew: Alone | Crew, journal: Journal, progress: Progress, publish: Publish) -> int:
        job, run = self._job, self._job.run
        step = journals.last(job.journal, "metrics").get("step", 0)
        outcome.running(run, step, self.command)
        mirror = MirrorProcess(run, self._paths)
        started_at = time.monotonic()
        try:
            with progress:
                watch = torchrun.run(module, job, crew.node, self._lock, _Observer(job, crew, progress))
            end = outcome.judge(watch, job, newest_checkpoint(run), self.command)
        except OSError as error:
            end = outcome.broken(error, step, newest_checkpoint(run), self.command)
        said = outcome.message(end)
        try:
            journal.event("left", stage=self._stage, elapsed_seconds=time.monotonic() - started_at)
            if end.exit_code == 0:
                said = publish(journal, mirror.run_id())
            journal.event("ended", stage=self._stage, outcome=end.outcome, cause=end.cause)
        except (OSError, MachineError) as error:
            # Where the journal is full too, the mirror reads the ending in status.json.
            end = outcome.unpublished(end, error, self.command)
            said = outcome.message(end)
        journal.close()
        # Workers wait for no MLflow.
        crew.dismiss(end.exit_code or 0)
        progress.say(said)
        end.write(run)
        wrong = mirror.finish()
        if wrong is None:
            progress.say(f"MLflow: {address(run, self._paths)}")
        else:
            cure = f"python -m pipeline sync --params {shlex.quote(str(self._paths.params))}"
            progress.say(f"MLflow does not have all of it yet ({wrong}). To catch up: {cure}")
        assert end.exit_code is not None
        return end.exit_code


class _Observer:
    """Shows people how the ranks get on."""

    def __init__(self, job: Job, crew: Alone | Crew, progress: Progress):
        self._job, self._crew, self._progress = job, crew, progress
        self._waiting, self._lost, self._patience = False, False, Patience()

    def failed(self, failure: Failure) -> str | None:
        """Say of every failure what happened and what becomes of it."""
        self._lost = True
        if failure.exit_code in torchrun.FINAL_EXITS:
            return None
        spent = self._patience.spent(failure)
        if not spent:
            source = newest_checkpoint(self._job.run) or "the beginning"
            self._progress.say(f"{outcome.describe(failure, self._job.config)}; starting again from {source}")
        return spent

    def say(self, text: str) -> None:
        """Pass it on."""
        self._progress.say(text)

    def heard(self) -> list[Failure]:
        """Show progress; what the other machines tell."""
        self._progress.tick()
        return self._crew.heard()

    def asked_to_stop(self) -> bool:
        """Whether a worker was told to."""
        return self._crew.leaving

    def over(self, idle_seconds: float) -> bool:
        """Whether the ranks have said their last word, and torchrun waits for one that was stopped elsewhere."""
        if idle_seconds < IDLE_SECONDS:
            self._waiting = False
            return False
        if journals.last(self._job.journal, "started", "finished", "stopped").get("kind") != "started":
            return True
        if self._lost and not self._waiting and idle_seconds > WAITING_SECONDS:
            self._progress.say(f"waiting for a lost worker to come back, for {torchrun.RETURN_SECONDS} s at most")
            self._waiting = True
        return False


def newest_checkpoint(run: Path) -> str | None:
    """The file a run would resume from."""
    folder = run / "checkpoints"
    index = read_sealed(folder / "index.json")
    if index is None:
        # The first rank makes it anew.
        return max(map(str, folder.glob("step-*.safetensors")), default=None)
    entries: list[dict[str, Any]] = index["checkpoints"]
    good = (folder / entry["file"] for entry in reversed(entries) if sha256_or_none(folder / entry["file"]) == entry["sha256"])
    return next(map(str, good), None)


def sha256_or_none(path: Path) -> str | None:
    """The digest of a file that may be missing."""
    return store.sha256(path) if path.exists() else None


def opening(config: Config, name: str) -> dict[str, Any]:
    """The first line of a journal: all that MLflow needs to create its run."""
    params = {f"{section}.{key}": value for section, values in config.model_dump(exclude={"seed"}).items() for key, value in values.items()}
    return {
        "experiment": config.tracking.experiment,
        "name": name,
        "params": {"seed": config.seed} | params,
        "tags": {"mlflow.source.name": "pipeline", "mlflow.user": machine.user()},
    }
