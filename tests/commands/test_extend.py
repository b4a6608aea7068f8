"""A data set, a model and a strategy are a file and a line each in a copy of this tree; the first two also a file beside params.yaml."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.params import load
from tests.kit.checkout import clone_of
from tests.kit.experiment import Experiment, clean_environment
from tests.kit.trainings import mlflow_runs

DATA = """
import numpy as np
from pipeline.data import Raw, Request, Split

def load(request: Request) -> Raw:
    random = np.random.Generator(np.random.PCG64(request.seed))
    def split(count: int) -> Split:
        labels = random.integers(0, 3, count)
        images = random.integers(0, 50, (count, 3, 16, 16)) + labels[:, None, None, None] * 60
        return Split(images.astype(np.uint8), labels.astype(np.int64))
    return Raw(split(480), split(100), ["dark", "grey", "light"])
"""
MODEL = """
from torch import nn

def build(channels: int, side: int, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(side), nn.Flatten(), nn.BatchNorm1d(channels), nn.Linear(channels, num_classes))
"""
STRATEGY = """
from pipeline.parallel import ddp

def build(task, lanes, ranks, settings):
    return ddp.build(task, lanes, ranks, settings)
"""


@pytest.mark.slow
def test_a_file_and_a_line_add_a_data_set_a_model_and_a_strategy(tmp_path: Path) -> None:
    tree, experiment = clone_of(tmp_path / "tree"), Experiment(tmp_path)
    for room, name, text in (("data", "brightness", DATA), ("models", "mean", MODEL), ("parallel", "mine", STRATEGY)):
        (tree / "pipeline" / room / f"{name}.py").write_text(text)
        catalogue = tree / "pipeline" / room / "__init__.py"
        line = f'CATALOGUE = {{\n    "{name}": "pipeline.{room}.{name}",\n'
        catalogue.write_text(catalogue.read_text().replace("CATALOGUE = {\n", line))
    experiment.set(data={"name": "brightness"}, model__name="mean", dist__strategy="mine", train__learning_rate=0.5)
    for command in ("prepare", "train", "evaluate"):
        words = [sys.executable, "-m", "pipeline", command, "--params", str(experiment.params)]
        done = subprocess.run(words, cwd=tree, env=clean_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert experiment.json("metrics/eval.json")["accuracy"] > 0.9
    assert experiment.json("metrics/eval.json")["class_accuracy"].keys() == {"dark", "grey", "light"}
    experiment.set(model__name="meen", data={"name": "brightness"})
    words = [sys.executable, "-m", "pipeline", "train", "--params", str(experiment.params)]
    done = subprocess.run(words, cwd=tree, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean mean?" in done.stderr


@pytest.mark.slow
def test_a_data_set_and_a_model_beside_params_yaml_are_what_they_were_when_they_were_trained(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path).with_database()
    (tmp_path / "mine.py").write_text(DATA + MODEL.replace("num_classes: int)", "num_classes: int, scale: float = 1.0)"))
    values = {"data": {"name": "mine.py:load"}, "train__learning_rate": 0.5}
    experiment.set(**values, model={"name": "mine.py:build", "options": {"scale": 2.0}})
    experiment.run("prepare")
    experiment.run("train")
    receipt = experiment.json("models/receipt.json")
    assert receipt["git"]["dirty"] is True
    assert load(experiment.run_folder / "params.yaml").model.options == {"scale": 2.0}
    # Another number of ranks, and a file that is gone meanwhile: evaluate and verify take what was trained with.
    experiment.set(**values, model={"name": "mine.py:build", "options": {"scale": 2.0}}, dist__world_size=1, dist__batch_size_per_gpu=96)
    assert "finished already" in experiment.run("train")
    (tmp_path / "mine.py").rename(tmp_path / "other.py")
    altered = json.loads(json.dumps(receipt))
    altered["parameters"]["model"]["source"] += "# Something else."
    (tmp_path / "models" / "receipt.json").write_text(json.dumps(altered))
    assert "its model is not the code that was trained with" in experiment.run("evaluate", expect=3)
    (tmp_path / "models" / "receipt.json").write_text(json.dumps(receipt))
    experiment.run("evaluate")
    assert experiment.json("metrics/eval.json")["accuracy"] > 0.9
    assert "bit-equal" in experiment.run("verify", "--world-size", "1")
    said = experiment.run("train", expect=2)
    assert "mine.py: No such file or directory; name a file, from the folder of params.yaml on" in said
    (tmp_path / "mine.py").write_text("def build(channels, side, num_classes):\n    raise ValueError('too deep')\n")
    experiment.set(**values | {"data": {"name": "mine.py:load"}}, model={"name": "mine.py:build"})
    said = experiment.run("train", expect=2)
    assert "model.name: mine.py:2: ValueError: too deep" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_model_that_torch_export_cannot_take_is_trained_and_evaluated_all_the_same(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path).with_database()
    branches = "    model.register_forward_pre_hook(lambda _, given: (given[0] * (2 if given[0].mean().item() > 0 else 1),))\n"
    (tmp_path / "mine.py").write_text(MODEL.replace("return", "model =") + branches + "    return model\n")
    experiment.set(model__name="mine.py:build", train__epochs=1)
    experiment.run("prepare")
    assert "torch.export cannot take this model, so MLflow gets none that loads by itself" in experiment.run("train")
    assert not (experiment.run_folder / "model.pt2").exists()
    assert "test accuracy" in experiment.run("evaluate")
    assert experiment.json("metrics/eval.json")["total"] > 0
    (run,) = mlflow_runs(experiment)
    assert run.info.status == "FINISHED"
