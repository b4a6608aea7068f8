"""The packed store: a folder of arrays and a manifest that holds the SHA-256 of each; read without torch."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from pipeline.config import Config, DataError, digest
from pipeline.data import Split, files_of, originals, well_formed
from pipeline.files import atomic_folder, atomic_write, check_room

MANIFEST = "manifest.json"
SPLITS = ("train", "validation", "test")
KINDS = ("images.npy", "labels.npy")
KINDS_OF_ORIGINALS = (originals.IMAGES, originals.ENDS, "labels.npy")
# In what prepared data were made for, where they are no pixels.
STORE = "data.store"
# Images at once.
PIECE = 1000
# What is read in less than a second is read at every start.
SMALL_BYTES, SETTLED_SECONDS = 256 * 2**20, 3.0


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
    # Images of each class.
    class_counts: dict[str, list[int]] = {}
    # Files that are no images, each with the reason.
    left_out: list[str] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = (KINDS, KINDS_OF_ORIGINALS)
        whole = any(set(self.sha256) == {f"{split}-{kind}" for split in SPLITS for kind in those} for those in kinds)
        if set(self.counts) != set(SPLITS) or not whole or min(self.counts.values()) < 1:
            raise ValueError("not these splits")
        if not self.class_names or min(self.shape) < 1 or {len(self.mean), len(self.std)} != {self.shape[0]} or min(self.std) <= 0:
            raise ValueError("not these classes or images")
        return self

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def digest(self) -> str:
        """One SHA-256 over the manifest, and so over all content; the same wherever it comes from."""
        values = self.model_dump(mode="json", exclude={"class_counts", "left_out"})
        return digest(values | {"made_for": {key: value for key, value in values["made_for"].items() if key != "data.root"}})

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
    left_out: list[str] | None = None,
) -> Manifest:
    """Check and pack the splits, then put the whole folder in place at once."""
    name = str(made_for["data.name"])
    well_formed.check(name, splits, class_names)
    with atomic_folder(folder) as scratch:
        check_room(scratch, sum(_size(array, STORE in made_for) for split in splits.values() for array in split))
        for split_name, split in splits.items():
            save(scratch / f"{split_name}-labels.npy", split.labels)
            if STORE not in made_for:
                save(scratch / f"{split_name}-images.npy", split.images)
            elif (files := files_of(split.images)) is not None:
                originals.write(scratch, split_name, files)
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
            sha256={path.name: sha256(path) for path in sorted(scratch.iterdir())},
            source_sha256=source_sha256,
            class_counts={name: np.bincount(split.labels, minlength=len(class_names)).tolist() for name, split in splits.items()},
            left_out=left_out or [],
        )
        (scratch / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n")
    return manifest


def _size(array: NDArray[Any], as_files: bool) -> int:
    files = files_of(array) if as_files else None
    return array.nbytes if files is None else sum(path.stat().st_size for path in files)


def save(path: Path, array: NDArray[Any]) -> None:
    """Write an array as np.save does, which would take a copy of all of it."""
    with path.open("wb") as out:
        header: dict[str, Any] = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
        np.lib.format.write_array_header_1_0(out, header)
        for piece in pieces(array):
            out.write(piece.data)
        out.flush()
        os.fsync(out.fileno())


def pieces(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """An array's rows, a thousand at once, as they lie in a file."""
    return (np.ascontiguousarray(array[start : start + PIECE]) for start in range(0, len(array), PIECE))


def _mean_and_std(images: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Per channel, of pixels from 0 to 1; from exact counts of the 256 values, so the order of the images does not matter."""
    counts = np.zeros((images.shape[1], 256), np.int64)
    for piece in pieces(images):
        for channel in range(images.shape[1]):
            counts[channel] += np.bincount(piece[:, channel].reshape(-1), minlength=256)
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
    values = config.data.model_dump(include={"name", "root", "validation_share", "image_size"})
    found = {"seed": config.seed} | {f"data.{key}": value for key, value in values.items()}
    return found | ({STORE: originals.decoder()} if config.data.store == "originals" else {})


def check_made_for(folder: Path, manifest: Manifest, config: Config) -> None:
    """Raise DataError if the folder was prepared from other settings."""
    expected = made_for(config)
    for key in sorted({*expected, *manifest.made_for}):
        if manifest.made_for.get(key) != (value := expected.get(key)):
            raise DataError(
                f"{folder}: was made for {key}: {manifest.made_for.get(key)}, now it is {value}; run: python -m pipeline prepare"
            )


def check_decoder(folder: Path, manifest: Manifest) -> None:
    """Raise DataError if images are decoded while they are read, and what decodes them here may give other pixels."""
    if (before := manifest.made_for.get(STORE)) not in (None, originals.decoder()):
        raise DataError(f"{folder}: has {before}, not {originals.decoder()}; install that Pillow, or run: python -m pipeline prepare")


def verify(folder: Path, manifest: Manifest, splits: tuple[str, ...], again: bool = False) -> None:
    """Raise DataError unless every byte of these splits is what prepare wrote.

    A large file that was read before is not read again, unless `again`, as long as it is the same and nobody has written to it.
    """
    check_decoder(folder, manifest)
    seen_in = folder.with_name(f".{folder.name}.seen.json")
    seen = {} if again else _seen(seen_in)
    for file, expected in manifest.sha256.items():
        path = folder / file
        if file.split("-")[0] not in splits or (path.is_file() and seen.get(file) == [expected, *_stamp(path)]):
            continue
        before, began_at = _stamp(path) if path.is_file() else None, time.time()
        found = sha256(path) if before else "nothing"
        if found != expected:
            raise DataError(f"{path}: expected SHA-256 {expected}, found {found}; run: python -m pipeline prepare")
        # What was written a moment ago could be written once more at the same time.
        if before == _stamp(path) and path.stat().st_size > SMALL_BYTES and began_at > path.stat().st_ctime + SETTLED_SECONDS:
            seen[file] = [expected, *_stamp(path)]
            with contextlib.suppress(OSError):
                atomic_write(seen_in, json.dumps(seen).encode())


def _stamp(path: Path) -> list[int]:
    """What changes when a file is written to, or another one takes its place."""
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _seen(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def open_split(folder: Path, split: str) -> Split:
    """Map a split's arrays from their files: pages are read when used, and shared between processes."""
    # "c": a private, writable mapping that nobody writes to; torch warns about read-only ones.
    labels = np.load(folder / f"{split}-labels.npy", mmap_mode="c")
    if (folder / f"{split}-{originals.IMAGES}").exists():
        check_decoder(folder, manifest := read_manifest(folder))
        return Split(cast("NDArray[np.uint8]", originals.Originals(folder, split, manifest.shape[-1])), labels)
    return Split(np.load(folder / f"{split}-images.npy", mmap_mode="c"), labels)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
