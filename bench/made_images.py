"""Images to measure with: JPEGs of mixed sizes in folders, and prepared ones of any amount."""

import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import numpy as np
import yaml
from numpy.typing import NDArray
from PIL import Image

from pipeline import data
from pipeline.config import params
from pipeline.data import Split, store

ROOT = Path(__file__).parents[1]


def make(folder: Path, count: int) -> None:
    """JPEGs of mixed sizes in ten folders: four pieces of clothing each, large, on a ground of colours that run into each other."""
    clothes = data.load("fashion-mnist", data.Request(None, ROOT / "data" / "raw", 1, None)).train
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        parts = [
            (folder, clothes.images[start : start + 500], clothes.labels[start : start + 500], start) for start in range(0, count, 500)
        ]
        list(pool.map(_make, parts))


def _make(part: tuple[Path, NDArray[np.uint8], NDArray[np.int64], int]) -> None:
    folder, images, labels, start = part
    random = np.random.default_rng(start)
    for number, label in enumerate(labels.tolist()):
        width, height = (int(one) for one in random.integers(240, 640, 2))
        ground = Image.fromarray(random.integers(0, 256, (3, 4, 3), np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
        alike = np.flatnonzero(labels == label)
        for column, row in ((0, 0), (0, 1), (1, 0), (1, 1)):
            piece = Image.fromarray(images[random.choice(alike), 0]).resize((width // 2, height // 2), Image.Resampling.BICUBIC)
            ground.paste(tuple(int(one) for one in random.integers(0, 256, 3)), (column * width // 2, row * height // 2), piece)
        place = folder / f"class-{label}"
        place.mkdir(parents=True, exist_ok=True)
        ground.save(place / f"{start + number:05}.jpg", quality=88)


class Repeated:
    """So many images, a thousand of them over and over."""

    def __init__(self, count: int, side: int):
        self._thousand = np.random.default_rng(0).integers(0, 256, (1000, 3, side, side), np.uint8)
        self.shape, self.dtype, self.ndim = (count, 3, side, side), np.dtype(np.uint8), 4
        self.nbytes = math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, piece: slice) -> NDArray[np.uint8]:
        return self._thousand[np.arange(*piece.indices(len(self))) % 1000]


def packed(folder: Path, total_bytes: int, side: int) -> Path:
    """An experiment whose prepared training images take so many bytes; returns its params.yaml."""
    folder.mkdir(parents=True)
    values = {
        "seed": 1,
        "data": {"name": "synthetic:1000", "image_size": side},
        "train": {"epochs": 1},
        "dist": {"world_size": 1, "lanes": 1, "batch_size_per_gpu": 32},
        "tracking": {"log_every_steps": 1},
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(values))

    def split(count: int) -> Split:
        return Split(cast("NDArray[np.uint8]", Repeated(count, side)), np.arange(count) % 10)

    counts = {"train": total_bytes // (3 * side * side), "validation": 32, "test": 32}
    made_for = store.made_for(params.load(folder / "params.yaml"))
    store.write(
        folder / "data" / "prepared", made_for, {name: split(count) for name, count in counts.items()}, [f"{one}" for one in range(10)]
    )
    return folder / "params.yaml"
