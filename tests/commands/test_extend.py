"""A data set, a model and a strategy are a file and a line each: added to a copy of this tree, and trained with."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.checkout import clone_of
from tests.kit.experiment import Experiment, clean_environment

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
from pipeline.parallel.ddp import Ddp

def build(task, lanes, ranks, settings):
    return Ddp(task, lanes, ranks, settings.reduction == "ordered")
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
