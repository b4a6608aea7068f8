"""Checkpoints as logged models: those that the run keeps, each whole, with its figures, sent beside everything else."""

import threading
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient, MlflowException
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT as LIMIT

from pipeline.tracking.journal import CHECKPOINT, Journal
from pipeline.tracking.logged_models import EVALUATED, CheckpointUploads, find_model, give_metrics
from pipeline.tracking.mirror import Mirror
from pipeline.tracking.points import Points
from pipeline.tracking.uploads import UPLOAD_SECONDS, uploading
from tests.kit.experiment import database

DIGEST = "0123456789abcdef"


class Run:
    """A run with a journal, its checkpoints' folder, and MLflow's run of it."""

    def __init__(self, folder: Path, client: MlflowClient):
        self.folder, self.client = folder, client
        self.experiment = client.create_experiment("lockstep", artifact_location=(folder / "mlartifacts").as_uri())
        self.id = client.create_run(self.experiment).info.run_id
        (folder / "checkpoints").mkdir()
        self.journal = Journal(folder / "journal.jsonl")
        dataset = {"name": "synthetic", "digest": DIGEST, "counts": {"train": 1}}
        self.journal.event("run", id="one", experiment="lockstep", name="one", params={}, tags={}, dataset=dataset)

    def save(self, name: str, content: bytes = b"weights") -> Path:
        path = self.folder / "checkpoints" / f"{name}.safetensors"
        path.write_bytes(content)
        self.journal.event(CHECKPOINT, step=int(name.partition("-")[2]))
        return path

    def logged(self) -> dict[str, Any]:
        return {model.name: model for model in self.client.search_logged_models([self.experiment])}

    def finish(self, uploads: CheckpointUploads) -> None:
        uploads.finish(self.id, self.experiment)

    def content(self, model: Any) -> bytes:
        (file,) = self.client.list_logged_model_artifacts(model.model_id)
        return Path(model.artifact_location.removeprefix("file://"), file.path).read_bytes()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "mlflow.db").write_bytes(database())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return Run(tmp_path, MlflowClient())


def test_mlflow_has_the_checkpoints_that_the_run_keeps_with_the_figures_of_their_step(run: Run) -> None:
    run.journal.metrics({"train/loss": 0.5, "system/cpu_utilization_percentage": 99.0}, 20)
    run.journal.metrics({"validation/accuracy": 0.75}, 20)
    run.journal.metrics({"best/validation_accuracy": 0.75, "test/accuracy": 0.5}, 20)
    run.journal.metrics({"train/loss": 0.25}, 40)
    first = run.save("step-00000020", b"twenty")
    # A person's own copy.
    (run.folder / "checkpoints" / "best-00000020 (1).safetensors").write_bytes(b"copy")
    run.save("best-00000020", b"best")
    uploads = CheckpointUploads(run.client, run.folder, Points())
    run.finish(uploads)
    found = run.logged()
    assert found.keys() == {"step-00000020", "best-00000020"}
    model = found["step-00000020"]
    assert (model.status, model.model_type, model.source_run_id, model.params) == ("READY", "checkpoint", run.id, {"step": "20"})
    assert {(one.key, one.value, one.step, one.dataset_name, one.dataset_digest) for one in model.metrics} == {
        ("train/loss", 0.5, 20, "synthetic", DIGEST[:12]),
        ("validation/accuracy", 0.75, 20, "synthetic", DIGEST[:12]),
    }
    assert {name: run.content(one) for name, one in found.items()} == {"step-00000020": b"twenty", "best-00000020": b"best"}
    assert {one.step for one in run.client.get_run(run.id).outputs.model_outputs} == {20}
    first.unlink()
    run.save("step-00000040")
    uploads.changed()
    run.finish(uploads)
    assert run.logged().keys() == {"step-00000040", "best-00000020"}
    assert sorted(path.name for path in (run.folder / "mlartifacts").rglob("*.safetensors")) == [
        "best-00000020.safetensors",
        "step-00000040.safetensors",
    ]


def test_a_checkpoint_that_was_half_sent_is_sent_again_and_a_whole_one_is_not(run: Run) -> None:
    run.client.create_logged_model(run.experiment, "step-00000020", run.id, model_type="checkpoint")
    run.save("step-00000020")
    run.finish(CheckpointUploads(run.client, run.folder, Points()))
    (model,) = run.logged().values()
    assert (model.status, run.content(model)) == ("READY", b"weights")
    run.finish(CheckpointUploads(run.client, run.folder, Points()))
    assert [one.model_id for one in run.logged().values()] == [model.model_id]


class Held(MlflowClient):
    """A client whose uploads wait until they are let go, and then fail the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.fails, self.began = threading.Event(), True, threading.Event()

    def log_model_artifact(self, *where: Any, **named: Any) -> None:
        self.began.set()
        assert self.held.wait(60)
        if self.fails:
            self.fails = False
            raise MlflowException("the link is gone")
        super().log_model_artifact(*where, **named)


def test_figures_arrive_while_a_checkpoint_is_being_sent_and_one_that_failed_is_sent_again(run: Run) -> None:
    client = Held()
    uploads = CheckpointUploads(client, run.folder, Points())
    run.save("step-00000020")
    uploads.start(run.id, run.experiment)
    assert client.began.wait(60)
    uploads.start(run.id, run.experiment)
    client.log_metric(run.id, "train/loss", 0.5)
    assert run.client.get_run(run.id).data.metrics == {"train/loss": 0.5}
    assert [one.status for one in run.logged().values()] == ["PENDING"]
    client.held.set()
    with pytest.raises(MlflowException, match="the link is gone"):
        run.finish(uploads)
    run.finish(uploads)
    assert [one.status for one in run.logged().values()] == ["READY"]


def test_one_that_the_ranks_remove_meanwhile_is_not_missed(run: Run) -> None:
    client = Held()
    client.fails = False
    uploads = CheckpointUploads(client, run.folder, Points())
    path = run.save("step-00000020")
    uploads.start(run.id, run.experiment)
    assert client.began.wait(60)
    path.unlink()
    run.save("step-00000040")
    client.held.set()
    uploads.changed()
    run.finish(uploads)
    assert run.logged().keys() == {"step-00000040"}


def test_the_finished_model_is_told_from_the_checkpoints_and_has_figures_too(run: Run) -> None:
    run.save("best-00000020")
    run.journal.metrics({"test/accuracy": 0.5}, 20)
    run.finish(CheckpointUploads(run.client, run.folder, Points()))
    assert find_model(run.client, run.id, run.experiment) is None
    made = run.client.create_logged_model(run.experiment, "model", run.id)
    found = find_model(run.client, run.id, run.experiment)
    assert found.model_id == made.model_id
    for _ in range(2):
        give_metrics(run.client, run.id, made.model_id, (run.folder / "journal.jsonl", 20), EVALUATED, Points())
    assert [(one.key, one.value) for one in run.client.get_logged_model(made.model_id).metrics] == [("test/accuracy", 0.5)]
    assert len(run.client.get_metric_history(run.id, "test/accuracy")) == 1


def test_requests_have_the_time_of_an_upload_until_the_last_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    first, second = uploading(), uploading()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    during = LIMIT.get()
    second.__exit__(None, None, None)
    assert (during, LIMIT.get()) == (UPLOAD_SECONDS, 5)


def test_an_end_waits_for_checkpoints_only_if_nothing_came_after_it(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(CheckpointUploads, "start", lambda *_: None)
    monkeypatch.setattr(CheckpointUploads, "finish", lambda *_: waited.append("finished"))
    mirror = Mirror(tmp_path)
    run.journal.event("ended", stage="train", outcome="stopped", cause="")
    run.journal.event("started", stage="train", tags={})
    run.journal.metrics({"train/loss": 0.5}, 20)
    mirror.catch_up()
    assert waited == []
    run.journal.event("ended", stage="train", outcome="done", cause="")
    mirror.catch_up()
    assert waited == ["finished"]
    (found,) = [one for one in run.client.search_runs([run.experiment]) if one.info.run_id != run.id]
    assert (found.info.status, found.data.metrics) == ("FINISHED", {"train/loss": 0.5})
