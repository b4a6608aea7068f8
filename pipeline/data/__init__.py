"""The catalogue of data sets: one module each, with `load(request) -> Raw`; importing it imports none of them."""

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.config import ConfigError, DataError, unknown

CATALOGUE = {
    "fashion-mnist": "pipeline.data.fashion_mnist",
    "synthetic": "pipeline.data.synthetic",
}


class Split(NamedTuple):
    """Images as uint8 [N, C, H, W] and labels as int64 [N]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Raw:
    """A data set as its source has it."""

    train: Split
    test: Split
    class_names: list[str]
    # Images drawn from the run's seed: another seed has others.
    depends_on_seed: bool = False


@dataclass(frozen=True)
class Request:
    """Where to find a data set, where to keep downloads, and the argument behind its name (2018 in `synthetic:2018`)."""

    root: Path | None
    downloads: Path
    seed: int
    argument: str | None


def check(name: str) -> None:
    """Raise ConfigError unless data.name is in the catalogue."""
    kind, _, argument = name.partition(":")
    if kind not in CATALOGUE:
        raise unknown("data.name", name, list(CATALOGUE))
    if ":" in name and not (argument.isdecimal() and int(argument) >= 100):
        raise ConfigError(f"data.name: {name!r}: the size must be a whole number of at least 100, such as {kind}:2018")


def load(name: str, request: Request) -> Raw:
    """Find, check and decode the named data set; `name:N` has its first N training images and all of its test images."""
    raw: Raw = importlib.import_module(CATALOGUE[name.partition(":")[0]]).load(request)
    count = int(request.argument or len(raw.train.labels))
    if count > len(raw.train.labels):
        raise DataError(f"data.name: {name!r}: there are {len(raw.train.labels)} training images; set that or a smaller number")
    return replace(raw, train=Split(raw.train.images[:count], raw.train.labels[:count]))
