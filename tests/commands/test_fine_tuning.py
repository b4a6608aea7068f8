"""Fine-tuning by its commands: a model that was trained before learns other classes from few images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline import data
from pipeline.data import Split
from tests.kit.experiment import ROOT, Experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHAPE: dict[str, Any] = {"dist__batch_size_per_gpu": 10, "dist__lanes": 2, "train__warmup_epochs": 0, "model__name": "lenet"}


@pytest.fixture(scope="module")
def source() -> Split:
    request = data.Request(None, ROOT / "data" / "raw", 1, None)
    return data.load("fashion-mnist", request).test


def experiment(folder: Path, source: Split, classes: range, train: int, test: int, **changes: Any) -> Experiment:
    """An experiment on so many images of each class, in folders, prepared."""
    for label in classes:
        own = iter(source.images[source.labels == label])
        for split, count in (("train", train), ("test", test)):
            place = folder / "photos" / split / f"class-{label}"
            place.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(np.asarray(next(own))[0]).save(place / f"{number}.png")
    values = {"data": {"name": "imagefolder", "root": "photos", "image_size": 28}}
    one = Experiment(folder).set(**SHAPE | values | changes).with_database()
    one.run("prepare")
    return one


def accuracy(one: Experiment) -> float:
    one.run("train")
    one.run("evaluate")
    return one.json("metrics/eval.json")["accuracy"]


def test_a_model_that_was_trained_on_other_classes_beats_one_from_scratch(tmp_path: Path, source: Split) -> None:
    first, few = tmp_path / "first", tmp_path / "few"
    first.mkdir()
    few.mkdir()
    experiment(first, source, range(4), 150, 20, train__epochs=4).run("train")
    scratch = experiment(few, source, range(5, 10), 10, 60, train__epochs=6)
    # Weights as they are published, and a head of another size.
    drawn = accuracy(scratch)
    values = {"data": {"name": "imagefolder", "root": "photos", "image_size": 28}, "train__epochs": 6}
    weights = first / "models" / "model.safetensors"
    tuned = Experiment(few).set(**SHAPE | values, model={"name": "lenet", "weights": str(weights), "frozen": ["0"]})
    found = accuracy(tuned)
    print(f"from scratch {drawn}, fine-tuned {found}")
    assert found > drawn
