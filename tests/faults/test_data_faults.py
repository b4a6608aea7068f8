"""Data that no model should see: refused before anything is written, with the place and the number that is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import DataError
from pipeline.data import Split, store

CLASSES = ["a", "b", "c"]


def good(count: int = 30, shape: tuple[int, ...] = (1, 8, 8)) -> Split:
    return Split(np.zeros((count, *shape), np.uint8), (np.arange(count) % 3).astype(np.int64))


def wrong_label() -> Split:
    split = good()
    split.labels[17] = 3
    return split


def without_a_class() -> Split:
    split = good()
    split.labels[:] %= 2
    return split


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        pytest.param({"train": wrong_label()}, "train: image 17 has label 3; there are 3 classes", id="label out of range"),
        pytest.param({"train": without_a_class()}, r"train: class 2 \(c\) has no image, of 30", id="empty class"),
        pytest.param({"test": good(0)}, "test: has no images", id="empty split"),
        pytest.param({"test": good(9, (3, 8, 8))}, "images of several shapes.*'test': \\(3, 8, 8\\)", id="other channels"),
        pytest.param({"test": good(9, (1, 9, 9))}, "images of several shapes.*set data.image_size", id="other size"),
        pytest.param({name: good(9, (1, 8, 9)) for name in ("train", "validation", "test")}, "8 x 9 pixels", id="not square"),
        pytest.param({"test": Split(good().images.astype(np.float32), good().labels)}, "float32 images", id="no bytes"),
        pytest.param({"test": Split(good().images, good(9).labels)}, "for 9 labels", id="labels missing"),
        pytest.param({"test": Split(good().images[:, 0], good().labels)}, "of shape \\(30, 8, 8\\)", id="without channels"),
    ],
)
@pytest.mark.fault(13, "labels out of range, an empty class, an empty split, other shapes and channels, other types, labels missing")
def test_what_is_wrong_with_data_is_said_with_its_place_and_nothing_is_written(
    splits: dict[str, Any], said: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    whole = {"train": good(), "validation": good(9), "test": good(9)} | splits
    with pytest.raises(DataError, match=said) as error:
        store.write(tmp_path / "prepared", {"data.name": "a set"}, whole, CLASSES)
    assert error.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []
    record_property("happened", f"exit 3: {error.value}")
