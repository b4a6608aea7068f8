"""The files of a run in MLflow: the checkpoints that it keeps, and the finished model."""

import contextlib
import json
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.tracking.journal import CHECKPOINTS
from pipeline.tracking.mlflow_flavor import Program

# The number of the pipe for `report_answers`.
ANSWERS = "LOCKSTEP_ANSWERS"
MODEL_TAG = "lockstep.model"
CHAMPION = "champion"
# Of a version of a registered model: on which test images it was measured.
ACCURACY_TAG, TESTS_TAG, CLEAN_TAG = "test/accuracy", "lockstep.tests", "lockstep.clean"
# How long a server may take to answer, or to take another piece, in an upload: it answers when it has stored the whole file.
UPLOAD_SECONDS = 120
# Small enough that an upload is seen to advance by what has been read of the file, on a slow link too.
SEND_BUFFER_BYTES = 1 << 18


@contextmanager
def uploading() -> Generator[None]:
    """Give MLflow's requests the time that a large file takes."""
    from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT as LIMIT

    before = LIMIT.get()
    LIMIT.set(max(UPLOAD_SECONDS, before))
    try:
        yield
    finally:
        LIMIT.set(before)


def limit_send_buffers() -> None:
    """Let a socket hold little of a file: what it holds is read, but not sent."""
    from urllib3.connection import HTTPConnection

    options: Any = HTTPConnection.default_socket_options
    options.append((socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES))


def report_answers(pipe: int) -> None:
    """Write a byte for every answer of a server: whoever waits for this process sees that it gets on, however slow the server is."""
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool

    for pool in (HTTPConnectionPool, HTTPSConnectionPool):
        pool.ConnectionCls = _reporting(pool.ConnectionCls, pipe)


def _reporting(connection: Any, pipe: int) -> Any:
    class Reporting(connection):
        def getresponse(self, *arguments: Any, **named: Any) -> Any:
            answer = super().getresponse(*arguments, **named)
            # A full pipe has told enough, and one without a reader is asked for nothing.
            with contextlib.suppress(OSError):
                os.write(pipe, b".")
            return answer

    return Reporting


def name_dataset(client: Any, run_id: str, dataset: dict[str, Any]) -> None:
    """Name the prepared data set as what the run was trained on; a second time changes nothing."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"name": dataset["name"]})
    # As much of the digest as people tell apart.
    found = Dataset(dataset["name"], dataset["digest"][:12], "prepared", source, profile=json.dumps(dataset["counts"]))
    client.log_inputs(run_id, datasets=[DatasetInput(found, [InputTag("mlflow.data.context", "training")])])


def send_checkpoints(client: Any, run_id: str, run: Path) -> None:
    """Make MLflow's checkpoints those that the run keeps now; one that was removed before it could be sent is not missed."""
    stored = {one.path: one.file_size for one in client.list_artifacts(run_id, CHECKPOINTS)}
    # Steps before the best, and the newest first.
    for path in sorted((run / CHECKPOINTS).glob("*.safetensors"), reverse=True):
        # The ranks may remove it at any time.
        with contextlib.suppress(FileNotFoundError), uploading():
            if stored.pop(f"{CHECKPOINTS}/{path.name}", None) != path.stat().st_size:
                client.log_artifact(run_id, str(path), CHECKPOINTS)
    for name in stored:
        _remove(client.get_run(run_id).info.artifact_uri, name)


def _remove(artifact_uri: str, name: str) -> None:
    from mlflow import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    # Not every store can, and not every user may: then MLflow keeps more than it has to.
    with contextlib.suppress(NotImplementedError, OSError, MlflowException):
        get_artifact_repository(artifact_uri).delete_artifacts(name)


def send_model(client: Any, run_id: str, experiment_id: str, program: Program) -> None:
    """Send the finished model, with its signature, loadable with `mlflow.pytorch.load_model` and no code of ours."""
    import mlflow
    from mlflow.models import Model

    if client.get_run(run_id).data.tags.get(MODEL_TAG):
        return
    for model in client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'"):
        # Of a mirror that was killed while it sent it.
        client.delete_logged_model(model.model_id)
    # Within its run: else it would be in MLflow's default experiment.
    with uploading(), mlflow.start_run(run_id=run_id):
        # Else it would have the path of this process's script.
        tags = {"mlflow.source.name": "pipeline"}
        Model.log(None, program, name="model", flavor_name="pytorch", tags=tags)
    client.set_tag(run_id, MODEL_TAG, "model")


def register(client: Any, run_id: str, experiment_id: str, evaluated: dict[str, Any]) -> None:
    """Make the model a version of a registered one; the champion is the best of those that come from committed code."""
    from mlflow import MlflowException

    logged = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", max_results=1)
    if not logged:
        # A person has removed it.
        return
    name = f"{client.get_experiment(experiment_id).name}-{evaluated['model']}"
    with contextlib.suppress(MlflowException):
        # It may be there.
        client.create_registered_model(name, description="Versions are evaluated runs; the champion has the best test accuracy.")
    versions = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    version = (
        versions[0] if versions else client.create_model_version(name, f"models:/{logged[0].model_id}", run_id, model_id=logged[0].model_id)
    )
    facts = {ACCURACY_TAG: evaluated["accuracy"], TESTS_TAG: evaluated["tests"], CLEAN_TAG: evaluated["clean"]}
    for tag, value in facts.items():
        client.set_model_version_tag(name, version.version, tag, str(value))
    if evaluated["clean"] and _beats_champion(client, name, evaluated):
        client.set_registered_model_alias(name, CHAMPION, version.version)


def _beats_champion(client: Any, name: str, evaluated: dict[str, Any]) -> bool:
    """Return True if there is no champion, or one that did worse on the same test images."""
    champion = client.get_registered_model(name).aliases.get(CHAMPION)
    if champion is None:
        return True
    tags = client.get_model_version(name, champion).tags
    return tags.get(TESTS_TAG) == evaluated["tests"] and float(tags.get(ACCURACY_TAG, "inf")) < evaluated["accuracy"]
