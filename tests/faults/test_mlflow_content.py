"""What MLflow holds after a troubled life of a run: one run, its checkpoints from the first stop on, no secret, no path of a machine."""

import os
import signal
import sqlite3
from pathlib import Path

import mlflow
import pytest

from tests.kit.experiment import LONGER, ROOT, Experiment
from tests.kit.trainings import wait_for_step

SECRET = "hunter2-is-no-password"
STOPS = [(30, signal.SIGINT), (90, signal.SIGKILL), (150, signal.SIGTERM)]
# Where MLflow itself keeps files, which a store beside them cannot say otherwise.
LOCATIONS = {
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
}


def told(store: Path) -> dict[tuple[str, str], str]:
    """All text in MLflow's database, by table and column."""
    with sqlite3.connect(store) as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        found: dict[tuple[str, str], str] = {}
        for table in tables:
            rows = database.execute(f"select * from {table}")
            columns = [column[0] for column in rows.description]
            found |= {(table, column): "" for column in columns}
            for row in rows:
                for column, value in zip(columns, row, strict=True):
                    found[table, column] += f"{value}\n"
    return found


@pytest.mark.slow
def test_mlflow_holds_one_run_with_its_checkpoints_no_secret_and_no_path(experiment: Experiment) -> None:
    experiment.set(**LONGER).run("prepare")
    store = experiment.folder / "mlflow.db"
    client = mlflow.MlflowClient(f"sqlite:///{store}")
    environment = {"AWS_SECRET_ACCESS_KEY": SECRET, "WANDB_API_KEY": SECRET}
    for number, (step, stop) in enumerate(STOPS):
        process = experiment.start("train", **environment)
        wait_for_step(experiment, step, process)
        process.send_signal(stop)
        process.communicate(timeout=60)
        if number == 0:
            (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
            assert run.info.status == "KILLED"
            checkpoints = client.search_logged_models([run.info.experiment_id])
            assert [one.name for one in checkpoints if one.status == "READY" and one.name.startswith("step-")]
    experiment.run("train", **environment)
    experiment.run("evaluate", **environment)
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert run.info.status == "FINISHED"
    (version,) = client.search_model_versions("name = 'lockstep-synthetic'")
    assert version.run_id == run.info.run_id
    paths = {str(ROOT), str(experiment.folder), str(Path.home())}
    for (table, column), text in told(store).items():
        assert SECRET not in text, (table, column)
        if (table, column) not in LOCATIONS:
            assert not [path for path in paths if path in text], (table, column)
    for path in (experiment.folder / "mlartifacts").rglob("*"):
        if path.is_file():
            # MLflow's own file says where MLflow keeps it, too.
            content = b"\n".join(line for line in path.read_bytes().split(b"\n") if not line.startswith(b"artifact_path: "))
            assert SECRET.encode() not in content, path
            assert not [one for one in paths if one.encode() in content], path
    assert os.environ.get("AWS_SECRET_ACCESS_KEY") != SECRET
