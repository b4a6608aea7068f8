"""Evaluation: every sample once, the same figures on any number of ranks, and all of it in MLflow's one run."""

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline import models
from pipeline.data import Split, store
from pipeline.data.batches import Pixels
from pipeline.training.evaluation import Evaluation
from tests.kit.experiment import Experiment, make_job


def evaluated(group, prepared: Path, count: int) -> tuple[float, int, int, int, list[list[int]]]:
    manifest, split = store.read_manifest(prepared), store.open_split(prepared, "test")
    torch.manual_seed(0)
    model = models.build("lenet", 1, 28, 10)
    pixels = Pixels(manifest.mean, manifest.std, torch.device("cpu"))
    result = Evaluation(Split(split.images[:count], split.labels[:count]), pixels, 10, group)(model, None)
    return result.loss, result.correct, result.top5_correct, result.total, result.confusion.tolist()


COUNTS = [1, 3, 250, 1009]


@pytest.mark.fault(14, "1, 3, 250 and 1009 images on 1, 2 and 3 ranks")
def test_figures_are_equal_on_one_two_and_three_ranks_for_sizes_that_nothing_divides(tmp_path: Path, run_ranks) -> None:
    prepared = make_job(tmp_path, data={"name": "synthetic:2018"}).prepared
    work = [(evaluated, (prepared, count)) for count in COUNTS]
    everyone = [result for size in (1, 2, 3) for result in run_ranks(size, *work)]
    assert len(everyone) == 6
    assert all(results == everyone[0] for results in everyone)
    for count, (_, correct, top5, total, confusion) in zip(COUNTS, everyone[0], strict=True):
        assert total == count == np.sum(confusion)
        assert correct == np.trace(confusion) <= top5


def test_figures_are_those_of_plain_torch(tmp_path: Path, run_ranks) -> None:
    prepared = make_job(tmp_path, data={"name": "synthetic:2018"}).prepared
    ((loss, correct, top5, _, _),) = run_ranks(2, (evaluated, (prepared, 1009)))[0]
    manifest, split = store.read_manifest(prepared), store.open_split(prepared, "test")
    torch.manual_seed(0)
    model = models.build("lenet", 1, 28, 10).eval()
    images = (torch.from_numpy(split.images).float() / 255 - manifest.mean[0]) / manifest.std[0]
    labels = torch.from_numpy(split.labels)
    with torch.no_grad():
        logits = model(images)
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert correct == (logits.argmax(1) == labels).sum().item()
    assert top5 == sum(int(label in row) for label, row in zip(labels.tolist(), logits.topk(5).indices.tolist(), strict=True))


@pytest.mark.slow
def test_train_and_evaluate_make_one_run_that_tells_all(experiment: Experiment) -> None:
    shape = {"data": {"name": "synthetic:2018", "image_size": 12}, "model__name": "resnet18", "train__epochs": 1}
    experiment.set(**shape).run("prepare")
    experiment.run("train", DVC_EXP_NAME="named-by-dvc")
    found = []
    for world_size in (1, 2, 3):
        experiment.set(**shape, dist__world_size=world_size)
        assert "test accuracy" in experiment.run("evaluate")
        found.append(experiment.json("metrics/eval.json"))
    assert found[0] == found[1] == found[2]
    assert found[0]["total"] == 1009
    assert found[0]["accuracy"] == found[0]["correct"] / 1009
    assert all(
        (experiment.folder / "plots" / name).stat().st_size for name in ("confusion.csv", "confusion.png", "curves.png", "classes.csv")
    )

    mlflow.set_tracking_uri(f"sqlite:///{experiment.folder / 'mlflow.db'}")
    client = mlflow.MlflowClient()
    (run,) = [run for one in client.search_experiments() for run in client.search_runs([one.experiment_id])]
    check_run(run, experiment.json("models/receipt.json"), found[0])
    names = {
        artifact.path for folder in ("", "plots", "checkpoints") for artifact in client.list_artifacts(run.info.run_id, folder or None)
    }
    assert {"receipt.json", "params.yaml", "eval.json", "plots/curves.png", "plots/confusion.csv"} <= names
    assert any(name.startswith("checkpoints/step-") for name in names)
    # All of it lies in the run's folder, where no other experiment writes.
    assert not any(Path(line["path"]).is_absolute() for line in experiment.journal("artifact"))
    check_model(run, store.open_split(experiment.folder / "data/prepared", "test"), found[0]["correct"])
    assert load_file(experiment.folder / "models/model.safetensors")["fc.weight"].shape == (10, 512)


def check_run(run: mlflow.entities.Run, receipt: dict[str, Any], found: dict[str, Any]) -> None:
    """MLflow's run says what the receipt and the metrics say."""
    assert run.info.status == "FINISHED"
    assert run.info.run_id == receipt["mlflow_run_id"]
    for name in ("accuracy", "top5_accuracy", "loss", "correct", "total"):
        assert run.data.metrics[f"test/{name}"] == found[name]
    wanted = {
        "train/loss",
        "train/learning_rate",
        "train/images_per_second",
        "validation/loss",
        "validation/accuracy",
        "best/validation_accuracy",
    }
    assert wanted <= run.data.metrics.keys()
    assert run.data.params["train.learning_rate"] == "0.05"
    tags = run.data.tags
    for name in ("fingerprint", "data_digest", "weights_sha256"):
        assert tags[f"lockstep.{name}"] == receipt[name]
    assert (tags["lockstep.world_size"], tags["lockstep.backend"]) == ("2", "gloo")
    assert tags["mlflow.source.git.commit"] == receipt["git"]["commit"]
    assert tags["dvc.experiment"] == "named-by-dvc"


def check_model(run: mlflow.entities.Run, split: Split, correct: int) -> None:
    """The logged model is the evaluated one: it takes the test images as they are."""
    model = mlflow.pytorch.load_model(f"runs:/{run.info.run_id}/model")
    with torch.no_grad():
        predicted = model(torch.from_numpy(split.images)).argmax(1)
    # All images at once instead of 250: a sample on the edge may fall to the other side.
    assert abs((predicted == torch.from_numpy(split.labels)).sum().item() - correct) <= 2
    signature = mlflow.models.get_model_info(f"runs:/{run.info.run_id}/model").signature
    assert signature.inputs.inputs[0].shape == (-1, 1, 12, 12)
