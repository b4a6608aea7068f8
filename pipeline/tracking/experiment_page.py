"""What people meet first in MLflow: the experiment's page, as one of model training, and its table with the columns that matter."""

import json
from pathlib import Path
from typing import Any

from pipeline.tracking.mirror_state import database_of

# Else a browser that has never seen MLflow shows traces and judges.
WORKFLOW = "workflowType=machine_learning"
# The name by which a link asks for the columns.
VIEW = "lockstep"
COLUMNS = (
    *("metrics.`best/validation_accuracy`", "metrics.`test/accuracy`", "metrics.`train/loss`"),
    *("metrics.`train/images_per_second`", "metrics.`total/hours`", "attributes.`Dataset`"),
    *("params.`model.name`", "params.`train.learning_rate`", "params.`seed`"),
    *("tags.`lockstep.global_batch`", "tags.`lockstep.world_size`", "tags.`lockstep.backend`", "tags.`lockstep.precision`"),
    *("tags.`lockstep.outcome`", "tags.`lockstep.comparable`"),
)
TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    f"mlflow.sharedViewState.{VIEW}": json.dumps(
        {"selectedColumns": COLUMNS, "orderByKey": "metrics.`best/validation_accuracy`", "orderByAsc": False, "runListHidden": False}
    ),
}


def described(experiment_id: str) -> dict[str, str]:
    """Return the tags of an experiment's page."""
    table = f"#/experiments/{experiment_id}/runs?{WORKFLOW}&viewStateShareKey={VIEW}"
    text = (
        f"[The runs with accuracy, speed, placement and outcome]({table}). "
        "Runs with the same `lockstep.comparable` differ in seed and placement alone."
    )
    return TAGS | {"mlflow.note.content": text}


def prepared_experiment(client: Any, name: str, run: Path) -> str:
    """Return the id of the run's experiment, which has the tags of its page; what a person has changed of them stays."""
    experiment = client.get_experiment_by_name(name) or client.get_experiment(_new_experiment(client, name, run))
    for tag, value in described(experiment.experiment_id).items():
        if tag not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, tag, value)
    return str(experiment.experiment_id)


def _new_experiment(client: Any, name: str, run: Path) -> str:
    # With a server, the server says where artifacts go.
    uri = client.tracking_uri
    # Beside a local database, else beside runs/, wherever that is now: a journal from elsewhere names another folder.
    store = database_of(uri) or run.resolve().parents[1] / "mlflow.db"
    artifacts = None if uri.startswith("http") else store.with_name("mlartifacts").as_uri()
    return str(client.create_experiment(name, artifact_location=artifacts))
