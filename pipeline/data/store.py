"""The packed store: a folder of arrays and a manifest that holds the SHA-256 of each; read without torch."""

import hashlib
import os
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from pipeline.config import Config, DataError, digest
from pipeline.data import Split
from pipeline.files import atomic_folder, check_room

MANIFEST = "manifest.json"
SPLITS = ("train", "validation", "test")


class Manifest(BaseModel):
    """Describes a prepared data set: enough to build a model for it and to check every byte of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    # The settings that prepare made it from.
    made_for: dict[str, str | int | float | None]
    class_names: list[str]
    shape: tuple[int, int, int]
    counts: dict[str, int]
    mean: list[float]
    std: list[float]
    sha256: dict[str, str]
    # Of what the source gave, before a share was held out by the seed; null where the source itself draws from the seed.
    source_sha256: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        files = {f"{split}-{kind}.npy" for split in SPLITS for kind in Split._fields}
        if set(self.counts) != set(SPLITS) or set(self.sha256) != files or min(self.counts.values()) < 1:
            raise ValueError("not these splits")
        if not self.class_names or min(self.shape) < 1 or {len(self.mean), len(self.std)} != {self.shape[0]} or min(self.std) <= 0:
            raise ValueError("not these classes or images")
        return self

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def digest(self) -> str:
        """One SHA-256 over the manifest, and so over all content."""
        return digest(self.model_dump(mode="json"))

    @property
    def identity(self) -> dict[str, str | None]:
        """What a run's identity holds of its data."""
        return {"prepared data": self.digest, "source data": self.source_sha256}


def write(
    folder: Path,
    made_for: dict[str, str | int | float | None],
    splits: dict[str, Split],
    class_names: list[str],
    source_sha256: str | None = None,
) -> Manifest:
    """Check and pack the splits, then put the whole folder in place at once."""
    name = str(made_for["data.name"])
    for split_name, split in splits.items():
        _check(f"{name}, {split_name}", split, class_names)
    _check_together(name, splits, class_names)
    with atomic_folder(folder) as scratch:
        check_room(scratch, sum(array.nbytes for split in splits.values() for array in split))
        sha256s: dict[str, str] = {}
        for split_name, split in splits.items():
            for kind, array in split._asdict().items():
                file = f"{split_name}-{kind}.npy"
                with (scratch / file).open("wb") as out:
                    np.save(out, np.ascontiguousarray(array))
                    out.flush()
                    os.fsync(out.fileno())
                sha256s[file] = sha256(scratch / file)
        mean, std = _mean_and_std(splits["train"].images)
        counts = {split_name: len(split.labels) for split_name, split in splits.items()}
        shape = splits["train"].images.shape[1:]
        manifest = Manifest(
            name=name,
            made_for=made_for,
            class_names=class_names,
            shape=shape,
            counts=counts,
            mean=mean,
            std=std,
            sha256=sha256s,
            source_sha256=source_sha256,
        )
        (scratch / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
    return manifest


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


def _mean_and_std(images: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Per channel, of pixels from 0 to 1; from exact counts of the 256 values, so the order of the images does not matter."""
    counts = [np.bincount(images[:, channel].reshape(-1), minlength=256) for channel in range(images.shape[1])]
    pixels = np.arange(256) / 255
    mean = [float((count * pixels).sum() / count.sum()) for count in counts]
    std = [float(np.sqrt((count * (pixels - center) ** 2).sum() / count.sum())) for count, center in zip(counts, mean, strict=True)]
    return mean, [max(value, 1 / 255) for value in std]


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a prepared folder; raises DataError if it is missing or damaged."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DataError(f"{path}: {(error.strerror or '').lower()}; run: python -m pipeline prepare") from None
    except ValidationError as error:
        raise DataError(f"{path}: is damaged ({error.error_count()} errors); run: python -m pipeline prepare") from None


def made_for(config: Config) -> dict[str, str | int | float | None]:
    """The settings that decide what prepare writes."""
    values = config.data.model_dump(include={"name", "validation_share", "image_size"})
    return {"seed": config.seed} | {f"data.{key}": value for key, value in values.items()}


def check_made_for(folder: Path, manifest: Manifest, config: Config) -> None:
    """Raise DataError if the folder was prepared from other settings."""
    for key, value in made_for(config).items():
        if manifest.made_for.get(key) != value:
            raise DataError(
                f"{folder}: was made for {key}: {manifest.made_for.get(key)}, now it is {value}; run: python -m pipeline prepare"
            )


def verify(folder: Path, manifest: Manifest, splits: tuple[str, ...]) -> None:
    """Raise DataError unless every byte of these splits is what prepare wrote."""
    for file, expected in manifest.sha256.items():
        if file.split("-")[0] not in splits:
            continue
        path = folder / file
        found = sha256(path) if path.is_file() else "nothing"
        if found != expected:
            raise DataError(f"{path}: expected SHA-256 {expected}, found {found}; run: python -m pipeline prepare")


def open_split(folder: Path, split: str) -> Split:
    """Map a split's arrays from their files: pages are read when used, and shared between processes."""
    # "c": a private, writable mapping that nobody writes to; torch warns about read-only ones.
    arrays: list[Any] = [np.load(folder / f"{split}-{kind}.npy", mmap_mode="c") for kind in Split._fields]
    return Split(*arrays)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
