"""A run's logged models in MLflow: the checkpoints that it keeps, sent beside everything else, and the finished model; and its data set."""

import contextlib
import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.files import fsync_path
from pipeline.tracking.journal import CHECKPOINTS, read
from pipeline.tracking.mlflow_flavor import Program
from pipeline.tracking.points import Points
from pipeline.tracking.uploads import uploading

MODEL, MODEL_TAG = "model", "lockstep.model"
# What MLflow shows as a logged model's type.
CHECKPOINT_TYPE = "checkpoint"
# The figures of a checkpoint, and of an evaluated model.
LEARNED = ("train/", "validation/")
EVALUATED = (*LEARNED, "test/")
NAME = re.compile(r"(?:step|best)-(\d+)")


class CheckpointUploads:
    """Makes MLflow's checkpoints those that the run keeps now, in a thread: a large file on a slow link holds up no figures.

    One that was removed before it could be sent is not missed.
    """

    def __init__(self, client: Any, run: Path, points: Points):
        self._client, self._run, self._points = client, run, points
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[None] | None = None
        # How many changes are known, are being sent, and are in MLflow; it is not known what an earlier process has sent.
        self._known, self._sending, self._sent = 1, 0, 0

    def changed(self) -> None:
        """The run keeps others than before."""
        self._known += 1

    def start(self, run_id: str, experiment_id: str) -> None:
        """Send what is new, unless something is being sent; raises what that met."""
        if self._future is not None and self._future.done():
            self._collect()
        if self._future is None and self._sent < self._known:
            self._sending = self._known
            self._future = self._pool.submit(send_checkpoints, self._client, run_id, experiment_id, self._run, self._points)

    def finish(self, run_id: str, experiment_id: str) -> None:
        """Send all that is new, and wait for it."""
        self.start(run_id, experiment_id)
        while self._future is not None:
            self._collect()
            self.start(run_id, experiment_id)

    def _collect(self) -> None:
        assert self._future is not None
        future, self._future = self._future, None
        future.result()
        self._sent = self._sending


def send_checkpoints(client: Any, run_id: str, experiment_id: str, run: Path, points: Points) -> None:
    """Send the checkpoints that MLflow does not have, steps before the best and the newest first, and remove those that the run has not."""
    stored: dict[str, Any] = {}
    for model in client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'"):
        if model.model_type == CHECKPOINT_TYPE:
            stored[model.name] = model
    # What else lies there is a person's.
    paths = sorted((path for path in (run / CHECKPOINTS).glob("*.safetensors") if NAME.fullmatch(path.stem)), reverse=True)
    for path in paths:
        model = stored.get(path.stem)
        if model is None or model.status != "READY":
            if model is not None:
                # Of a mirror that was killed while it sent it.
                _delete(client, model)
            _send_checkpoint(client, run_id, experiment_id, path, points)
    for name in stored.keys() - {path.stem for path in paths}:
        _delete(client, stored[name])


def _send_checkpoint(client: Any, run_id: str, experiment_id: str, path: Path, points: Points) -> None:
    from mlflow.entities import LoggedModelOutput

    step = int(path.stem.partition("-")[2])
    model = client.create_logged_model(experiment_id, path.stem, run_id, params={"step": str(step)}, model_type=CHECKPOINT_TYPE)
    try:
        with uploading():
            client.log_model_artifact(model.model_id, str(path))
    except FileNotFoundError:
        # The ranks may remove it at any time.
        client.delete_logged_model(model.model_id)
        return
    give_metrics(client, run_id, model.model_id, (path.parents[1] / "journal.jsonl", step), LEARNED, points)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
    client.finalize_logged_model(model.model_id, "READY")


def give_metrics(client: Any, run_id: str, model_id: str, at: tuple[Path, int], figures: tuple[str, ...], points: Points) -> None:
    """Give a logged model some figures of one step in the run's journal, and name the data set that they belong to.

    MLflow keeps them with the run's too, where a point of equal time, step and value is stored once.
    """
    from mlflow.entities import Metric

    (journal, step), dataset = at, dict[str, str]()
    found: dict[str, Any] = {}
    fsync_path(journal)
    for line in read(journal):
        if line["kind"] == "run" and "dataset" in line:
            dataset = {"dataset_name": line["dataset"]["name"], "dataset_digest": short(line["dataset"]["digest"])}
        elif line["kind"] == "metrics" and line["step"] == step:
            found |= {name: (line["at"], value) for name, value in line["values"].items() if name.startswith(figures)}
    known = {name: points.known(name, step, new) for name, new in found.items()}
    metrics = [Metric(name, value, at, step, model_id=model_id, **dataset) for name, (at, value) in known.items()]
    client.log_batch(run_id, metrics=metrics)


def name_dataset(client: Any, run_id: str, dataset: dict[str, Any]) -> None:
    """Name the prepared data set as what the run was trained on; a second time changes nothing."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"name": dataset["name"]})
    found = Dataset(dataset["name"], short(dataset["digest"]), "prepared", source, profile=json.dumps(dataset["counts"]))
    client.log_inputs(run_id, datasets=[DatasetInput(found, [InputTag("mlflow.data.context", "training")])])


def short(digest: str) -> str:
    """Return as much of a digest as people tell apart."""
    return digest[:12]


def _delete(client: Any, checkpoint: Any) -> None:
    """Delete the file too, which MLflow would keep."""
    from mlflow import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    # Not every store can, and not every user may: then MLflow keeps more than it has to.
    with contextlib.suppress(NotImplementedError, OSError, MlflowException):
        get_artifact_repository(checkpoint.artifact_location).delete_artifacts(f"{checkpoint.name}.safetensors")
    client.delete_logged_model(checkpoint.model_id)


def send_model(client: Any, run_id: str, experiment_id: str, program: Program) -> None:
    """Send the finished model, with its signature, loadable with `mlflow.pytorch.load_model` and no code of ours."""
    import mlflow
    from mlflow.models import Model

    if client.get_run(run_id).data.tags.get(MODEL_TAG):
        return
    # Of a mirror that was killed while it sent it.
    left = find_model(client, run_id, experiment_id)
    if left is not None:
        client.delete_logged_model(left.model_id)
    # Within its run: else it would be in MLflow's default experiment.
    with uploading(), mlflow.start_run(run_id=run_id):
        # Else it would have the path of this process's script.
        tags = {"mlflow.source.name": "pipeline"}
        Model.log(None, program, name=MODEL, flavor_name="pytorch", tags=tags)
    client.set_tag(run_id, MODEL_TAG, MODEL)


def find_model(client: Any, run_id: str, experiment_id: str) -> Any:
    """Return the logged model that is the run's finished one; None if there is none, or a person has removed it."""
    found = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}' and name = '{MODEL}'", max_results=1)
    return found[0] if found else None
