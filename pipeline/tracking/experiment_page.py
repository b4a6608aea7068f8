"""What people meet first in MLflow: the experiment's page, as one of model training, and its table with the columns that matter."""

import json
from typing import Any

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


def prepare_page(client: Any, experiment: Any) -> None:
    """Give an experiment the tags that it lacks; what a person has changed stays."""
    for name, value in described(experiment.experiment_id).items():
        if name not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, name, value)
