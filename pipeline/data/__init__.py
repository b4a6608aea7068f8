"""The catalogue of data sets: one module each, with `load(request) -> Raw`; importing it imports none of them."""

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from pipeline.config import ConfigError, DataError, own_code, unknown

CATALOGUE = {
    "cifar10": "pipeline.data.torchvision_sets",
    "cifar100": "pipeline.data.torchvision_sets",
    "fashion-mnist": "pipeline.data.fashion_mnist",
    "imagefolder": "pipeline.data.imagefolder",
    "kmnist": "pipeline.data.torchvision_sets",
    "mnist": "pipeline.data.torchvision_sets",
    "stl10": "pipeline.data.torchvision_sets",
    "svhn": "pipeline.data.torchvision_sets",
    "synthetic": "pipeline.data.synthetic",
    "usps": "pipeline.data.torchvision_sets",
}


class Split(NamedTuple):
    """Images as uint8 [N, C, H, W] and labels as int64 [N]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


class Picked:
    """Some images of an array, without a copy of them: what `store.write` asks of an array."""

    def __init__(self, images: NDArray[np.uint8], indices: NDArray[np.int64], paths: list[Path] | None = None):
        self._images, self._indices = images, indices
        # Of the files that they were decoded from.
        known = paths or files_of(images)
        self.paths = [known[index] for index in indices] if known else None
        self.shape, self.dtype, self.ndim = (len(indices), *images.shape[1:]), images.dtype, images.ndim
        self.nbytes = math.prod(self.shape)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, piece: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        return self._images[self._indices[piece]]


def picked(split: Split, indices: NDArray[np.int64], paths: list[Path] | None = None) -> Split:
    """These images and labels of a split, of whose images `paths` are the files."""
    return Split(cast("NDArray[np.uint8]", Picked(split.images, indices, paths)), split.labels[indices])


def files_of(images: object) -> list[Path] | None:
    """The files that images were decoded from, where there are some."""
    return images.paths if isinstance(images, Picked) else None


@dataclass(frozen=True)
class Raw:
    """A data set as its source has it."""

    train: Split
    test: Split
    class_names: list[str]
    # Where the source has one; else a share of the training images is held out.
    validation: Split | None = None
    # Images drawn from the run's seed: another seed has others.
    depends_on_seed: bool = False
    # Where the seed decides what is for the test: of all images together.
    source_sha256: str | None = None
    # Files that are no images, each with the reason.
    left_out: list[str] = field(default_factory=list[str])
    # To be called once it is packed.
    packed: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Request:
    """Where to find a data set, where to keep downloads, and the argument behind its name (2018 in `synthetic:2018`)."""

    root: Path | None
    downloads: Path
    seed: int
    argument: str | None
    # Of the catalogue; one module may have several.
    name: str = ""
    # What images of several sizes are to become.
    image_size: int | None = None
    # Where a data set that is decoded may lie meanwhile; beside the downloads where nothing is said.
    scratch: Path | None = None
    # The folder of params.yaml.
    home: Path = Path()
    # How many images that cannot be decoded may be left out.
    allow_broken: int = 0


def check(name: str) -> None:
    """Raise ConfigError unless data.name is in the catalogue."""
    kind, _, argument = name.partition(":")
    if own_code.is_own(name):
        return
    if kind not in CATALOGUE:
        raise unknown("data.name", name, [*CATALOGUE, "<file>.py:<function>"])
    if ":" in name and not (argument.isdecimal() and int(argument) >= 100):
        raise ConfigError(f"data.name: {name!r}: the size must be a whole number of at least 100, such as {kind}:2018")


def title(settings: dict[str, Any]) -> str:
    """What models of a data set are known by: its name in the catalogue, and for images in folders that of the folder too."""
    kind = settings["name"].partition(":")[0].removesuffix(".py")
    return f"{kind}-{Path(settings['root']).name}" if kind == "imagefolder" else kind


def load(name: str, request: Request) -> Raw:
    """Find, check and decode the named data set; `name:N` has its first N training images and all of its test images."""
    if own_code.is_own(name):
        return _own(name, request)
    kind = name.partition(":")[0]
    raw: Raw = importlib.import_module(CATALOGUE[kind]).load(replace(request, name=kind))
    if request.argument is None:
        return raw
    count = int(request.argument)
    if count > len(raw.train.labels):
        raise DataError(f"data.name: {name!r}: there are {len(raw.train.labels)} training images; set that or a smaller number")
    return replace(raw, train=Split(raw.train.images[:count], raw.train.labels[:count]))


def _own(name: str, request: Request) -> Raw:
    """Call the function in a file of the user's own."""
    text = own_code.read("data.name", name, request.home)
    file, function = name.rsplit(":", 1)
    with own_code.Blamed("data.name", name):
        raw = getattr(own_code.load(file, text), function)(replace(request, name=name, argument=None))
        if not isinstance(raw, Raw):
            raise DataError(f"data.name: {name} returned {type(raw).__name__}; it must return a pipeline.data.Raw")
        splits: dict[str, Any] = {"train": raw.train, "test": raw.test, "validation": raw.validation}
        if missing := [key for key in ("train", "test") if splits[key] is None]:
            raise DataError(f"data.name: {name}, {missing[0]}: is None; only validation may be None")
        checked = {key: None if split is None else _checked(f"data.name: {name}, {key}", split) for key, split in splits.items()}
        names: Any = raw.class_names
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise DataError(f"data.name: {name}, class_names: is {type(names).__name__}; it must be a list of names")
        return replace(raw, **checked, class_names=[str(one) for one in names])


def _checked(where: str, split: Any) -> Split:
    """Images and labels as the store takes them; raises DataError for what cannot be such."""
    wanted = "they must be uint8 [N, channels, side, side] and whole numbers [N]"
    try:
        images, labels = np.asarray(split[0]), np.asarray(split[1])
    except (TypeError, ValueError, LookupError) as error:
        # Such as images of unequal shapes.
        raise DataError(f"{where}: are no arrays of images and labels ({(str(error).splitlines() or [''])[0]}); {wanted}") from None
    if images.dtype != np.uint8 or images.ndim != 4 or labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        found = f"{images.dtype} {list(images.shape)} and {labels.dtype} {list(labels.shape)}"
        raise DataError(f"{where}: images and labels are {found}; {wanted}")
    return Split(images, labels.astype(np.int64))
