"""The mirror: a process beside the training that repeats the journal in MLflow, `python -m pipeline.tracking.mirror RUN`.

It ends when its standard input is closed, which happens too when the launcher is killed: then the journal has no ending and
the run is marked KILLED. Metrics carry the journal's own times, so sending a line twice changes nothing.
"""

import contextlib
import json
import logging
import math
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config import MachineError
from pipeline.files import fsync_path
from pipeline.stop_signals import beside_a_training
from pipeline.tracking import logged_models, uploads
from pipeline.tracking.database import opening
from pipeline.tracking.experiment_page import prepared_experiment
from pipeline.tracking.journal import CHECKPOINT, Tail, last, read
from pipeline.tracking.mirror_state import State, error_line, read_state, sending, server_id, write_error, write_state
from pipeline.tracking.mlflow_flavor import Program
from pipeline.tracking.points import Points
from pipeline.tracking.registry import register

log = logging.getLogger(__name__)

BATCH = 900
PAUSE_SECONDS = 3.0
RUN_TAG = "lockstep.run"
STATUS = {"done": "FINISHED", "stopped": "KILLED"}
FAILED = ("failed", "configuration", "data", "machine", "diverged")


class Mirror:
    """One run's journal in MLflow."""

    def __init__(self, run: Path):
        # Only here: importing MLflow takes seconds.
        import mlflow
        from mlflow.entities import Metric, Param, RunTag

        self._mlflow, self._metric, self._param, self._tag = mlflow, Metric, Param, RunTag
        self._run = run
        self._pending: list[Any] = []
        self._points = Points()
        with opening(mlflow.get_tracking_uri()):
            self._client = mlflow.MlflowClient()
        self._state = self._known(read_state(run), server_id(mlflow.get_tracking_uri()))
        self._tail = Tail(run / "journal.jsonl", self._state.offset)
        self._checkpoints = logged_models.CheckpointUploads(self._client, run, self._points)
        if self._state.repeated and self._state.offset:
            self._points.load(self._client, self._state.run_id)

    def _known(self, state: State, server: str) -> State:
        """How far this MLflow has the run: from the beginning, where it is another one or has lost it."""
        if state.server != server or not state.run_id:
            return State(server=server)
        try:
            self._client.get_run(state.run_id)
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return State(server=server)
        return replace(state, error=None)

    def catch_up(self) -> None:
        """Repeat all that is new in the journal."""
        for line in self._tail:
            if line["kind"] == "metrics":
                at, step = line["at"], line["step"]
                fresh = ((name, value) for name, value in line["values"].items() if self._points.is_new(name, step))
                self._pending += [self._metric(name, value, at, step) for name, value in fresh]
                if len(self._pending) < BATCH:
                    continue
            elif line["kind"] == CHECKPOINT:
                self._checkpoints.changed()
                continue
            self._flush()
            handler = getattr(self, f"_on_{line['kind']}", None)
            if handler is not None:
                handler(line)
            self._mark()
        self._flush()
        self._mark()
        if self._state.run_id:
            self._checkpoints.start(self._state.run_id, self._state.experiment_id)

    def failed(self) -> None:
        """Go back to what is certain to be in MLflow."""
        self._pending.clear()
        self._tail.offset = self._state.offset

    def settle(self) -> None:
        """The journal will not grow: MLflow must have all of it, and a run without an ending was killed."""
        if self._lost():
            self._tail.offset = 0
            self.catch_up()
        lost = self._lost()
        if lost:
            self._state = replace(self._state, offset=0)
            write_state(self._run, self._state)
            raise self._mlflow.MlflowException(f"MLflow has not kept what it took, such as {lost[0]}")
        self._checkpoints.finish(self._state.run_id, self._state.experiment_id)
        if last(self._run / "journal.jsonl", "started", "ended").get("kind") == "started":
            self._client.set_terminated(self._state.run_id, "FAILED" if self._outcome() in FAILED else "KILLED")

    def _lost(self) -> list[str]:
        """Of which figures MLflow does not have the newest value: a server that takes everything may keep nothing."""
        wanted: dict[str, tuple[int, float]] = {}
        for line in read(self._run / "journal.jsonl"):
            if line["kind"] == "metrics":
                wanted |= {name: (line["step"], value) for name, value in line["values"].items()}
        kept = self._client.get_run(self._state.run_id).data.metrics
        missed = ((name, step) for name, (step, value) in wanted.items() if kept.get(name) != value and math.isfinite(value))
        # Where a journal was cut, MLflow may have newer ones.
        return [name for name, step in missed if not self._points.has(name, step)]

    def _outcome(self) -> str:
        """What status.json says, which has room for an ending even where the journal has none."""
        path = self._run / "status.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return str(json.loads(path.read_bytes())["outcome"])
        return "running"

    def _mark(self) -> None:
        state = replace(self._state, offset=self._tail.offset)
        if state != read_state(self._run):
            self._state = state
            write_state(self._run, state)

    def _flush(self) -> None:
        if self._tail.offset != self._state.offset:
            # Before MLflow hears of it: a power cut must not take from the journal what MLflow has.
            fsync_path(self._run / "journal.jsonl")
        for start in range(0, len(self._pending), BATCH):
            self._client.log_batch(self._state.run_id, metrics=self._pending[start : start + BATCH])
        self._pending.clear()

    def _on_run(self, line: dict[str, Any]) -> None:
        """Find the run by our own tag before creating it: a create that was repeated would make two."""
        experiment = prepared_experiment(self._client, line["experiment"], self._run)
        found = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{line['id']}'", max_results=1)
        if found:
            run_id = found[0].info.run_id
            self._points.load(self._client, run_id)
            self._client.log_batch(run_id, tags=[self._tag(name, str(value)) for name, value in line["tags"].items()])
        else:
            tags = line["tags"] | {RUN_TAG: line["id"]}
            run_id = self._client.create_run(experiment, start_time=line["at"], tags=tags, run_name=line["name"]).info.run_id
            self._points.forget()
        if not run_id:
            raise self._mlflow.MlflowException("the server has made a run without an id")
        self._client.log_batch(run_id, params=[self._param(name, str(value)) for name, value in line["params"].items()])
        if "dataset" in line:
            logged_models.name_dataset(self._client, run_id, line["dataset"])
        self._state = replace(self._state, run_id=run_id, experiment_id=experiment, repeated=bool(found))

    def _on_started(self, line: dict[str, Any]) -> None:
        self._client.update_run(self._state.run_id, status="RUNNING")
        self._on_tags(line)

    def _on_lanes(self, line: dict[str, Any]) -> None:
        self._on_tags({"tags": {"lockstep.lanes_per_rank": str(line["per_rank"])}})

    def _on_tags(self, line: dict[str, Any]) -> None:
        self._client.log_batch(self._state.run_id, tags=[self._tag(name, str(value)) for name, value in line["tags"].items()])

    def _on_description(self, line: dict[str, Any]) -> None:
        images = (f"![{path}](get-artifact?path={path}&run_uuid={self._state.run_id})" for path in line["images"])
        self._on_tags({"tags": {"mlflow.note.content": "\n\n".join([line["text"], *images])}})

    def _on_artifact(self, line: dict[str, Any]) -> None:
        with uploads.uploading():
            self._client.log_artifact(self._state.run_id, str(self._inside(line["path"])), line["folder"])

    def _on_model(self, line: dict[str, Any]) -> None:
        program = Program(self._inside(line["path"]), line)
        logged_models.send_model(self._client, self._state.run_id, self._state.experiment_id, program)

    def _on_evaluated(self, line: dict[str, Any]) -> None:
        model = logged_models.find_model(self._client, self._state.run_id, self._state.experiment_id)
        # A person may have removed it.
        self._state = replace(self._state, model="")
        if model is not None:
            self._state = replace(self._state, model=register(self._client, self._state.run_id, model, line))
            at = self._run / "journal.jsonl", line.get("step", -1)
            logged_models.give_metrics(self._client, self._state.run_id, model.model_id, at, logged_models.EVALUATED, self._points)

    def _inside(self, name: str) -> Path:
        """A file of this run: a journal from elsewhere may name any."""
        path = (self._run / name).resolve()
        if not path.is_relative_to(self._run.resolve()):
            raise OSError(f"{self._run / 'journal.jsonl'}: {name} is outside of the run's folder")
        return path

    def _on_ended(self, line: dict[str, Any]) -> None:
        if self._tail.offset == (self._run / "journal.jsonl").stat().st_size:
            # What is marked as ended is not looked at again; where there is more, its figures come first.
            self._checkpoints.finish(self._state.run_id, self._state.experiment_id)
        self._on_tags({"tags": {"lockstep.outcome": line["outcome"]}})
        self._client.set_terminated(self._state.run_id, STATUS.get(line["outcome"], "FAILED"), line["at"])


def follow(run: Path, closed: threading.Event) -> bool:
    """Mirror until nobody writes any more; returns True if MLflow then has all of it."""
    from google.protobuf.json_format import ParseError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    uploads.limit_send_buffers()
    if uploads.ANSWERS in os.environ:
        uploads.report_answers(int(os.environ[uploads.ANSWERS]))
    write_error(run, None)
    mirror: Mirror | None = None
    while True:
        ending = closed.is_set()
        try:
            mirror = mirror or Mirror(run)
            mirror.catch_up()
            if ending:
                mirror.settle()
                return True
        except (MlflowException, SQLAlchemyError, OSError, ValueError, ParseError, MachineError) as error:
            log.warning("%s", error_line(error))
            write_error(run, error_line(error))
            if mirror is not None:
                mirror.failed()
            if ending:
                return False
        closed.wait(PAUSE_SECONDS)


def main() -> int:
    """Run beside a training, in the time that it leaves over."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # Whoever stops the training wants its end to be in MLflow.
    closed = beside_a_training()
    run = Path(sys.argv[1])
    # The mirror of an earlier start may still be sending.
    with sending(run):
        return 0 if follow(run, closed) else 1


if __name__ == "__main__":
    sys.exit(main())
