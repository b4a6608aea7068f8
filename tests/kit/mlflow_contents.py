"""What MLflow holds of a run, to be compared with another one's."""

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Run

# Which run it was, when, and by whom: of two equal trainings these differ.
OWN_TAGS = ("lockstep.run", "mlflow.log-model.history", "mlflow.runColor")
OWN_FACTS = ("journal", "elapsed_seconds", "mlflow_run_id", "git")


def in_mlflow(uri: str, tag: str) -> dict[str, Any]:
    """All that MLflow holds of a run, apart from what depends on the clock or the machine; of files their SHA-256."""
    client = mlflow.MlflowClient(uri)
    (run,) = [
        one
        for experiment in client.search_experiments()
        for one in client.search_runs([experiment.experiment_id])
        if one.data.tags.get("lockstep.run") == tag
    ]
    metrics = {
        name: sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
        if "per_second" not in name and not name.startswith(("total/", "system/"))
    }
    tags = {name: value.replace(run.info.run_id, "RUN") for name, value in run.data.tags.items() if name not in OWN_TAGS}
    tags = {name: re.sub(r"[0-9.]+ ms on rank \d", "TIME", value) for name, value in tags.items()}
    held = {"status": run.info.status, "params": run.data.params, "metrics": metrics, "tags": tags}
    data = [(one.dataset.name, one.dataset.digest) for one in run.inputs.dataset_inputs]
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    figures = {one.name: sorted((value.key, value.step) for value in one.metrics or ()) for one in models if one.name != "model"}
    held |= {"models": sorted((one.name, one.status) for one in models), "figures": figures}
    return held | {"data": data, "artifacts": artifacts(uri, run)}


def artifacts(uri: str, run: Run) -> dict[str, str]:
    """The SHA-256 of every file of a run in MLflow, but for pictures of times, and of its whole checkpoints."""
    client = mlflow.MlflowClient(uri)
    with tempfile.TemporaryDirectory() as folder:
        if client.list_artifacts(run.info.run_id):
            client.download_artifacts(run.info.run_id, "", folder)
        for model in client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'"):
            if model.name != "model" and model.status == "READY":
                file = f"{model.artifact_location}/{model.name}.safetensors"
                mlflow.artifacts.download_artifacts(file, dst_path=f"{folder}/checkpoints", tracking_uri=uri)
        files = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()}
        contents = {name: path.read_bytes() for name, path in files.items() if name != "plots/ranks.png"}
    if "receipt.json" in contents:
        learned = {name: value for name, value in json.loads(contents["receipt.json"]).items() if name not in OWN_FACTS}
        contents["receipt.json"] = json.dumps(learned).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
