"""Whether splits are what can be packed and trained on."""

import numpy as np

from pipeline.config import DataError
from pipeline.data import Split


def check(name: str, splits: dict[str, Split], class_names: list[str]) -> None:
    """Raise DataError unless images are squares of one size and labels are of these classes, each of which is trained on."""
    for split_name, split in splits.items():
        _check(f"{name}, {split_name}", split, class_names)
    _check_together(name, splits, class_names)


def _check(where: str, split: Split, class_names: list[str]) -> None:
    images, labels = split
    if len(labels) == 0:
        raise DataError(f"{where}: has no images")
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(labels):
        raise DataError(f"{where}: {images.dtype} images of shape {images.shape} for {len(labels)} labels; expected uint8 [N, C, H, W]")
    wrong = np.flatnonzero((labels < 0) | (labels >= len(class_names)))
    if len(wrong):
        raise DataError(f"{where}: image {wrong[0]} has label {labels[wrong[0]]}; there are {len(class_names)} classes")


def _check_together(name: str, splits: dict[str, Split], class_names: list[str]) -> None:
    shapes = {split_name: split.images.shape[1:] for split_name, split in splits.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"{name}: images of several shapes: {shapes}; set data.image_size")
    _, height, width = shapes["train"]
    if height != width:
        raise DataError(f"{name}: images of {height} x {width} pixels; set data.image_size to make them square")
    empty = np.flatnonzero(np.bincount(splits["train"].labels, minlength=len(class_names)) == 0)
    if len(empty):
        raise DataError(f"{name}, train: class {empty[0]} ({class_names[empty[0]]}) has no image, of {len(splits['train'].labels)}")
