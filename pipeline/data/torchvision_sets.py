"""CIFAR-10, CIFAR-100, STL-10, SVHN and the MNISTs as torchvision reads them: unpacked, packed, or downloaded."""

import logging
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
from numpy.typing import NDArray

from pipeline.config import DataError
from pipeline.data import Raw, Request, Split
from pipeline.files import locked

log = logging.getLogger(__name__)

# torchvision's name, and how it is asked for the training and the test images.
SETS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cifar10": ("CIFAR10", {"train": True}, {"train": False}),
    "cifar100": ("CIFAR100", {"train": True}, {"train": False}),
    "kmnist": ("KMNIST", {"train": True}, {"train": False}),
    "mnist": ("MNIST", {"train": True}, {"train": False}),
    "stl10": ("STL10", {"split": "train"}, {"split": "test"}),
    "svhn": ("SVHN", {"split": "train"}, {"split": "test"}),
    "usps": ("USPS", {"train": True}, {"train": False}),
}
DIGITS = [str(digit) for digit in range(10)]
# Of MNIST's and USPS's files no digest is checked: parsing raises these where they are damaged.
DAMAGED = (RuntimeError, OSError, EOFError, ValueError, TypeError, LookupError, AssertionError)


def load(request: Request) -> Raw:
    """The data set from data.root, or from where downloads are kept; DataError where its files are not those that are known."""
    from torchvision import datasets

    name, for_training, for_test = SETS[request.name]
    kind: Any = getattr(datasets, name)
    downloads = request.downloads / request.name
    request.downloads.mkdir(parents=True, exist_ok=True)
    # Others of this workspace wait until it is there whole.
    with locked(request.downloads / f".{request.name}.lock"):
        folder = request.root or downloads
        if request.root and hasattr(kind, "tgz_md5"):
            folder = _unpacked(kind, request.root, downloads)
        train, test = (_read(kind, folder, folder is downloads, request.name, which) for which in (for_training, for_test))
    if not hasattr(train, "classes") and hasattr(kind, "tgz_md5"):
        raise DataError(f"{folder / kind.base_folder}: lacks the names of the classes; unpack {kind.filename} again")
    return Raw(
        Split(_channels_first(train), _labels(train)), Split(_channels_first(test), _labels(test)), list(getattr(train, "classes", DIGITS))
    )


def _read(kind: Any, folder: Path, download: bool, name: str, which: dict[str, Any]) -> Any:
    """One split; downloads nothing that is there."""
    try:
        if download:
            folder.mkdir(exist_ok=True)
        part = kind(str(folder), download=download, **which)
        if not 0 < len(part.data) == len(_labels(part)):
            raise ValueError(f"{len(part.data)} images and {len(_labels(part))} labels")
        return part
    except (*DAMAGED, HTTPException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        elsewhere = isinstance(error, URLError | HTTPException) or getattr(error, "errno", None)
        if download and not elsewhere and (damaged := _damaged(kind, folder)):
            raise DataError(f"{damaged}: is not as it is known ({reason}); remove it and run again") from None
        files = f"{kind.__name__}/raw with the unpacked files" if hasattr(kind, "resources") else getattr(kind, "filename", "its files")
        cure = f"put {files} there, or set data.root to a folder that has them"
        raise DataError(f"{folder}: {name} is not there, or not as it is known ({reason}); {cure}") from None


def _damaged(kind: Any, folder: Path) -> Path | None:
    """Return what torchvision could not read and would not download again, as it is there."""
    from torchvision.datasets.utils import check_integrity

    if hasattr(kind, "resources"):
        raw = folder / kind.__name__ / "raw"
        return raw if all((raw / Path(packed).stem).is_file() for packed, _ in kind.resources) else None
    known = getattr(kind, "split_list", {}).values()
    return next((folder / file for _, file, md5 in known if (folder / file).is_file() and not check_integrity(folder / file, md5)), None)


def _unpacked(kind: Any, root: Path, downloads: Path) -> Path:
    """Return the folder if its files are unpacked in it; else link its archive to where it may be unpacked: the folder is its owner's."""
    if (root / kind.base_folder).is_dir() or not (root / kind.filename).is_file():
        if not root.is_dir():
            raise DataError(f"data.root: {root} is not a folder; name one with {kind.filename}, or set root: null")
        return root
    from torchvision.datasets.utils import check_integrity

    archive, link = root / kind.filename, downloads / kind.filename
    if not check_integrity(archive, kind.tgz_md5):
        # torchvision would download another through the link, in its place.
        raise DataError(f"{archive}: is not the known archive; remove it, or set root: null to download it")
    downloads.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(archive.resolve())
    log.info("%s is unpacked into %s", archive, downloads)
    return downloads


def _channels_first(part: Any) -> NDArray[np.uint8]:
    images: NDArray[np.uint8] = np.asarray(part.data)
    if images.ndim == 3:
        return images[:, None]
    return np.ascontiguousarray(images if images.shape[1] == 3 else images.transpose(0, 3, 1, 2))


def _labels(part: Any) -> NDArray[np.int64]:
    return np.asarray(part.targets if hasattr(part, "targets") else part.labels, np.int64)
