"""Train and evaluate: the same figures on any number of ranks, and all of it in MLflow's one run."""

import csv
import importlib.metadata
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline import models
from pipeline.config import Config
from pipeline.config.params import load
from pipeline.data import store
from pipeline.data.batches import Pixels, chunks
from pipeline.hardware import machine
from pipeline.tracking.receipt import comparable
from tests.kit.experiment import ROOT, Experiment
from tests.kit.trainings import status

SHAPE = {"data": {"name": "synthetic:1018", "image_size": 12}, "model__name": "resnet18", "train__epochs": 1}


@pytest.mark.slow
def test_train_and_evaluate_make_one_run_that_tells_all(experiment: Experiment) -> None:
    experiment.set(**SHAPE).run("prepare")
    experiment.run("train", DVC_EXP_NAME="named-by-dvc")
    found = []
    for world_size in (1, 3):
        experiment.set(**SHAPE, dist__world_size=world_size)
        assert "test accuracy" in experiment.run("evaluate")
        found.append(experiment.json("metrics/eval.json"))
    assert found[0] == found[1]
    ended = status(experiment)
    assert (ended["stage"], ended["outcome"], ended["step"]) == ("evaluate", "done", experiment.json("models/receipt.json")["steps"])
    assert found[0]["total"] == 509
    assert found[0]["accuracy"] == found[0]["correct"] / 509
    check_tables(experiment, found[0])
    check_receipt(experiment)

    mlflow.set_tracking_uri(f"sqlite:///{experiment.folder / 'mlflow.db'}")
    client = mlflow.MlflowClient()
    (run,) = [run for one in client.search_experiments() for run in client.search_runs([one.experiment_id])]
    check_run(run, experiment.json("models/receipt.json"), found[0])
    check_page(client.get_experiment(run.info.experiment_id))
    # Evaluated twice, and registered once.
    (version,) = client.search_model_versions("name = 'lockstep-synthetic'")
    assert (version.run_id, version.tags["test/accuracy"]) == (run.info.run_id, str(found[0]["accuracy"]))
    clean = experiment.json("models/receipt.json")["git"]["dirty"] is False
    assert version.tags["lockstep.clean"] == str(clean)
    assert client.get_registered_model("lockstep-synthetic").aliases == ({"champion": version.version} if clean else {})
    names = {artifact.path for folder in ("", "plots") for artifact in client.list_artifacts(run.info.run_id, folder or None)}
    assert {"receipt.json", "params.yaml", "eval.json", "plots/curves.png", "plots/ranks.png", "plots/confusion.csv"} <= names
    check_models(client, run, experiment, found[0]["accuracy"])
    # All of it lies in the run's folder, where no other experiment writes.
    assert not any(Path(line["path"]).is_absolute() for line in experiment.journal("artifact"))
    (experiment.folder / "elsewhere").mkdir()
    check_model(run, experiment.folder / "data/prepared", experiment.folder / "elsewhere", found[0]["correct"])
    assert load_file(experiment.folder / "models/model.safetensors")["fc.weight"].shape == (10, 512)


def check_models(client: mlflow.MlflowClient, run: Any, experiment: Experiment, accuracy: float) -> None:
    """MLflow has the model and the checkpoints that are kept, with their figures."""
    models = {one.name: one for one in client.search_logged_models([run.info.experiment_id])}
    assert models.keys() == {"model", *(path.stem for path in experiment.run_folder.glob("checkpoints/*.safetensors"))}
    best = run.data.metrics["best/validation_accuracy"]
    figures = {one.key: one.value for one in models["model"].metrics}
    assert (figures["test/accuracy"], figures["validation/accuracy"]) == (accuracy, best)
    (kept,) = (one for name, one in models.items() if name.startswith("best-"))
    assert {one.key: one.value for one in kept.metrics}["validation/accuracy"] == best


def table(experiment: Experiment, name: str) -> list[dict[str, str]]:
    with (experiment.folder / "plots" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def check_tables(experiment: Experiment, found: dict[str, Any]) -> None:
    """The tables for plots hold what the published model predicts, and what the journal has."""
    prepared = experiment.folder / "data/prepared"
    manifest, split = store.read_manifest(prepared), store.open_split(prepared, "test")
    model = models.build("resnet18", 1, 12, 10).to(memory_format=torch.channels_last).eval()
    model.load_state_dict(load_file(experiment.folder / "models/model.safetensors"))
    pixels = Pixels(manifest.mean, manifest.std, torch.device("cpu"))
    with torch.no_grad():
        predicted = torch.cat([model(pixels(torch.from_numpy(split.images[piece]))).argmax(1) for piece in chunks(509, 250)]).tolist()
    pairs = Counter(zip(split.labels.tolist(), predicted, strict=True))
    names = manifest.class_names
    assert {(row["actual"], row["predicted"]): int(row["count"]) for row in table(experiment, "confusion.csv")} == {
        (names[actual], names[other]): pairs[actual, other] for actual in range(10) for other in range(10)
    }
    images = Counter(split.labels.tolist())
    by_class = {names[label]: pairs[label, label] / images[label] for label in range(10)}
    assert {row["class"]: float(row["accuracy"]) for row in table(experiment, "classes.csv")} == by_class == found["class_accuracy"]
    told = {line["step"]: line["values"] for line in experiment.journal("metrics") if "train/loss" in line["values"]}
    curves = {int(row["step"]): row for row in table(experiment, "curves.csv") if row["train_loss"]}
    assert curves.keys() == told.keys()
    assert all(
        float(curves[step][name]) == values[f"train/{name[6:]}"]
        for step, values in told.items()
        for name in ("train_loss", "train_accuracy", "train_top5_accuracy")
    )
    for name in ("confusion.png", "classes.png", "curves.png", "worst.png"):
        assert (experiment.folder / "plots" / name).read_bytes().startswith(b"\x89PNG")


def check_receipt(experiment: Experiment) -> None:
    """The receipt says what was computed, with what and on what; metrics/train.json has its last figures."""
    receipt, metrics = experiment.json("models/receipt.json"), experiment.json("metrics/train.json")
    for name in ("torch", "torchvision", "numpy", "mlflow", "dvc"):
        assert receipt["versions"][name] == importlib.metadata.version(name)
    assert receipt["device"] == machine.detect().cpu
    assert (receipt["precision"], receipt["parameters"]["train"]["learning_rate"], receipt["parameters"]["seed"]) == ("fp32", 0.05, 1)
    assert Config.model_validate(receipt["parameters"]) == load(experiment.set(**SHAPE).params)
    assert receipt["placement"] == {"world_size": 2, "nodes": 1, "backend": "gloo", "lanes_per_rank": [2, 2]}
    (last,) = receipt["epochs"]
    assert metrics == {
        "best": {"epoch": 1, "validation_accuracy": last["validation_accuracy"]},
        "last": {"train_loss": float.fromhex(last["train_loss"]), "validation_loss": float.fromhex(last["validation_loss"])},
        "steps": receipt["steps"],
    }
    figures = {name: value for line in experiment.journal("metrics") for name, value in line["values"].items()}
    assert float.fromhex(last["validation_loss"]) == figures["validation/loss"]


def check_run(run: mlflow.entities.Run, receipt: dict[str, Any], found: dict[str, Any]) -> None:
    """MLflow's run says what the receipt and the metrics say."""
    assert run.info.status == "FINISHED"
    assert run.info.run_id == receipt["mlflow_run_id"]
    for name in ("accuracy", "top5_accuracy", "loss", "correct", "total"):
        assert run.data.metrics[f"test/{name}"] == found[name]
    wanted = {
        "train/loss",
        "train/top5_accuracy",
        "train/learning_rate",
        "train/images_per_second",
        "validation/loss",
        "validation/accuracy",
        "validation/top5_accuracy",
        "best/validation_accuracy",
        "total/hours",
        "system/cpu_utilization_percentage",
        "system/system_memory_usage_megabytes",
    }
    assert wanted <= run.data.metrics.keys()
    assert run.data.params["train.learning_rate"] == "0.05"
    tags = run.data.tags
    for name in ("fingerprint", "data_digest", "weights_sha256"):
        assert tags[f"lockstep.{name}"] == receipt[name]
    assert (tags["lockstep.world_size"], tags["lockstep.backend"]) == ("2", "gloo")
    assert tags["mlflow.source.git.commit"] == receipt["git"]["commit"]
    assert tags["dvc.experiment"] == "named-by-dvc"
    assert tags["lockstep.comparable"] == comparable(receipt["identity"])
    note = tags["mlflow.note.content"]
    assert receipt["weights_sha256"] in note
    assert note.count("| test accuracy |") == 1 and f"{found['accuracy']:.4f}" in note
    for name in ("curves", "confusion", "worst"):
        assert f"![plots/{name}.png](get-artifact?path=plots/{name}.png&run_uuid={run.info.run_id})" in note
    (dataset,) = [one.dataset for one in run.inputs.dataset_inputs]
    assert dataset.digest == receipt["data_digest"][:12]


def check_page(experiment: mlflow.entities.Experiment) -> None:
    """MLflow opens the experiment as model training, and a link shows its runs with columns that they have."""
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert (
        f"#/experiments/{experiment.experiment_id}/runs?workflowType=machine_learning&viewStateShareKey=lockstep"
        in (experiment.tags["mlflow.note.content"])
    )
    (run,) = mlflow.MlflowClient().search_runs([experiment.experiment_id])
    columns = json.loads(experiment.tags["mlflow.sharedViewState.lockstep"])["selectedColumns"]
    for kind, held in (("metrics", run.data.metrics), ("params", run.data.params), ("tags", run.data.tags)):
        assert {column.split("`")[1] for column in columns if column.startswith(f"{kind}.")} <= held.keys()


ALONE = """
import base64, csv, io, json, pathlib, sys
import mlflow, numpy, torch
assert not [path for path in sys.path if path in ("", sys.argv[3])]
images = numpy.load(sys.argv[2])
with torch.no_grad():
    logits = mlflow.pytorch.load_model(sys.argv[1])(torch.from_numpy(images))
model = mlflow.pyfunc.load_model(sys.argv[1])
found = model.predict(images)
from PIL import Image
picture = io.BytesIO()
Image.fromarray(images[0, 0]).save(picture, "png")
pathlib.Path("one.png").write_bytes(picture.getvalue())
text = base64.b64encode(picture.getvalue()).decode()
for one in ([pathlib.Path("one.png")], [picture.getvalue()], numpy.array([text]), {"image": [text]}):
    again = model.predict(__import__("pandas").DataFrame(one) if isinstance(one, dict) else one)
    assert again.iloc[0]["class"] == found.iloc[0]["class"], again
    assert abs(again.iloc[0]["probability"] - found.iloc[0]["probability"]) < 1e-5
for wrong, said in ((["one.png"], "is not base64; a path is given as pathlib.Path"), (images[:, :, 1:], "expected images of shape")):
    try:
        model.predict(wrong)
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
assert not [name for name in sys.modules if name.partition(".")[0] in ("pipeline", "tests")]
print(json.dumps({"logits": logits.argmax(1).tolist(), "classes": found["class"].tolist(), "probabilities": found["probability"].tolist()}))
"""


def check_model(run: mlflow.entities.Run, prepared: Path, elsewhere: Path, correct: int) -> None:
    """The logged model is the evaluated one, and needs none of this code: it takes the test images as they are, or files."""
    path = mlflow.artifacts.download_artifacts(f"runs:/{run.info.run_id}/model", dst_path=str(elsewhere))
    # -I: neither the current folder nor PYTHONPATH is searched.
    words = [sys.executable, "-I", "-c", ALONE, path, str(prepared / "test-images.npy"), str(ROOT)]
    done = subprocess.run(words, cwd=elsewhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    labels, names = store.open_split(prepared, "test").labels, store.read_manifest(prepared).class_names
    # All images at once instead of 250: a sample on the edge may fall to the other side.
    assert abs(int((np.array(told["logits"]) == labels).sum()) - correct) <= 2
    assert sum(name == names[label] for name, label in zip(told["classes"], labels, strict=True)) == correct
    with Path(mlflow.artifacts.download_artifacts(f"runs:/{run.info.run_id}/predictions.csv", dst_path=str(elsewhere))).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["predicted"] for row in rows] == told["classes"]
    # To the last bit, in one piece or in evaluate's.
    assert [float(row["probability"]) for row in rows] == told["probabilities"]
    assert [row["actual"] for row in rows] == [names[label] for label in labels]
    outputs = mlflow.models.get_model_info(path).signature.outputs.inputs
    assert [one.name for one in outputs] == ["class", "probability", *(f"p({name})" for name in names)]
