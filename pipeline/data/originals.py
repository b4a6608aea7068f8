"""Image files as they are, one after the other in one file, and decoded when they are read."""

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.config import DataError
from pipeline.data.decode import decode
from pipeline.hardware.cgroup import usable_cpus

# Of a split.
IMAGES, ENDS = "originals.bin", "ends.npy"


def decoder() -> str:
    """What decodes: another one may give other pixels."""
    return f"originals for Pillow {version('pillow')}"


def write(folder: Path, split: str, paths: list[Path]) -> None:
    """Write the files of a split, and where each ends."""
    ends = np.empty(len(paths), np.int64)
    with (folder / f"{split}-{IMAGES}").open("wb") as out:
        for index, path in enumerate(paths):
            out.write(path.read_bytes())
            ends[index] = out.tell()
        out.flush()
        os.fsync(out.fileno())
    with (folder / f"{split}-{ENDS}").open("wb") as out:
        np.save(out, ends)
        out.flush()
        os.fsync(out.fileno())


class Originals:
    """What readers ask of an array of images, each decoded when it is taken: by threads, which Pillow lets run beside each other."""

    def __init__(self, folder: Path, split: str, side: int):
        self._ends: NDArray[np.int64] = np.load(folder / f"{split}-{ENDS}")
        self._path = folder / f"{split}-{IMAGES}"
        self._file, self._side = os.open(self._path, os.O_RDONLY), side
        self.shape, self.dtype, self.ndim = (len(self._ends), 3, side, side), np.dtype(np.uint8), 4
        # Such as EXIF that is not as it should be.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        # Of the cores of this machine, a rank's share.
        self._threads = ThreadPoolExecutor(max(1, usable_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, wanted: int | slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        if isinstance(wanted, int):
            return self._decoded(wanted)
        found = np.empty((len(indices := np.arange(len(self))[wanted]), *self.shape[1:]), np.uint8)
        for place, image in enumerate(self._threads.map(self._decoded, indices.tolist())):
            found[place] = image
        return found

    def _decoded(self, index: int) -> NDArray[np.uint8]:
        start, end = (int(self._ends[one]) if one >= 0 else 0 for one in (index - 1, index))
        image = decode(BytesIO(os.pread(self._file, end - start, start)), self._side, f"{self._path}, image {index}")
        if isinstance(image, str):
            raise DataError(f"{image}; run: python -m pipeline prepare")
        return image
