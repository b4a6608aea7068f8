"""Classes of unequal size: reported, and weighed where that is asked for."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import prepare
from pipeline.config import Config
from pipeline.data import store
from pipeline.data.batches import balanced
from pipeline.files import Paths
from tests.kit.experiment import settings
from tests.unit.data.test_imagefolder import picture


def prepared(folder: Path, counts: dict[str, int]) -> store.Manifest:
    for name, count in counts.items():
        for split, number in (("train", count), ("val", 1), ("test", 2)):
            (folder / "images" / split / name).mkdir(parents=True)
            for index in range(number):
                picture(index).save(folder / "images" / split / name / f"{index}.png")
    values = {"data": {"name": "imagefolder", "root": "images", "image_size": 8}}
    prepare.run(Config.model_validate(settings(**values)), Paths(folder / "params.yaml"))
    return store.read_manifest(folder / "data" / "prepared")


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"ant": 4, "bee": 9, "cow": 6}, "the classes have from 4 (ant) to 9 (bee) training images; train.class_weights: balanced makes"),
        ({"ant": 4, "bee": 8, "cow": 6}, None),
    ],
)
def test_prepare_counts_the_images_of_each_class_and_says_where_they_differ_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, counts: dict[str, int], said: str | None
) -> None:
    with caplog.at_level(logging.INFO):
        manifest = prepared(tmp_path, counts)
    assert manifest.class_counts == {"train": [*counts.values()], "validation": [1, 1, 1], "test": [2, 2, 2]}
    assert ("class_weights" in caplog.text) == (said is not None)
    assert (said or "") in caplog.text


def test_balanced_classes_weigh_the_same_together_and_1_in_the_mean() -> None:
    labels = np.repeat(np.arange(3), [5, 20, 75])
    weights = balanced(labels, torch.device("cpu"))
    together = weights * torch.tensor([5, 20, 75])
    assert torch.allclose(together, together.mean().expand(3))
    assert weights[torch.from_numpy(labels)].mean() == pytest.approx(1)
