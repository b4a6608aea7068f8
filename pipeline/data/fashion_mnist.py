"""Fashion-MNIST: from a folder, from Debian's package, from torchvision's mirrors, or from Debian's archive."""

import gzip
import hashlib
import logging
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline.config import DataError
from pipeline.data import Raw, Request, Split
from pipeline.files import atomic_folder, make_folder

log = logging.getLogger(__name__)

INSTALLED = Path("/usr/share/datasets/fashion-mnist")
PACKAGE = "dataset-fashion-mnist"
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
# The training images, decoded.
LONGEST_BYTES = 16 + 60000 * 784
# SHA-256 of the decoded idx files: Debian's gzip files differ from Zalando's, the bytes inside do not.
DIGESTS = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def load(request: Request) -> Raw:
    """Fashion-MNIST from the first source that has it; DataError names a file whose content is not the known one."""
    folder = request.root or find(request.downloads / "fashion-mnist")
    if not folder.is_dir():
        raise DataError(f"data.root: {folder} is not a folder; name one with the four Fashion-MNIST files, or set root: null")
    content = {name: _decoded(folder, name) for name in DIGESTS}
    return Raw(
        Split(_images(content["train-images-idx3-ubyte"]), _labels(content["train-labels-idx1-ubyte"])),
        Split(_images(content["t10k-images-idx3-ubyte"]), _labels(content["t10k-labels-idx1-ubyte"])),
        CLASSES,
    )


def find(downloads: Path) -> Path:
    """Return the folder that has the files, or download them into this one; raises DataError where nobody has them."""
    if (INSTALLED / "t10k-labels-idx1-ubyte.gz").exists():
        return INSTALLED
    if all((downloads / name).exists() or (downloads / f"{name}.gz").exists() for name in DIGESTS):
        return downloads
    tried = [str(INSTALLED), str(downloads)]
    make_folder(downloads.parent)
    for source in (_from_mirrors, _from_debian):
        with tempfile.TemporaryDirectory(dir=downloads.parent, prefix=".fetching-") as scratch:
            try:
                found = source(Path(scratch))
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                tried.append(f"{(source.__doc__ or '').rstrip('.')} ({_first_line(error)})")
                continue
            log.info("Fashion-MNIST comes from %s", (source.__doc__ or "").rstrip("."))
            _keep(found, downloads)
            return downloads
    raise DataError(f"Fashion-MNIST was not found in {'; '.join(tried)}. Set data.root to a folder with its four files.")


def _keep(found: Path, downloads: Path) -> None:
    """Move a complete download into place: a reader sees all of it or nothing."""
    with atomic_folder(downloads) as whole:
        for name in DIGESTS:
            shutil.copyfile(found / f"{name}.gz", whole / f"{name}.gz")


def _from_mirrors(scratch: Path) -> Path:
    """torchvision's mirrors."""
    from torchvision.datasets import FashionMNIST

    FashionMNIST(str(scratch), download=True)
    return scratch / "FashionMNIST" / "raw"


def _from_debian(scratch: Path) -> Path:
    """Debian's archive."""
    (scratch / "lists" / "partial").mkdir(parents=True)
    own = ["-o", f"Dir::State::Lists={scratch / 'lists'}", "-o", f"Dir::Cache={scratch}", "-o", "APT::Sandbox::User="]
    for command in (["apt-get", *own, "-qq", "update"], ["apt-get", *own, "-qq", "download", PACKAGE]):
        subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=300)
    (package,) = scratch.glob(f"{PACKAGE}_*.deb")
    subprocess.run(["dpkg-deb", "-x", str(package), str(scratch / "unpacked")], check=True, capture_output=True, timeout=60)
    return scratch / "unpacked" / INSTALLED.relative_to("/")


def _first_line(error: Exception) -> str:
    said = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines: Iterator[str] = (line.strip() for line in said.splitlines() if line.strip())
    return next(lines, type(error).__name__)


def _decoded(folder: Path, name: str) -> bytes:
    """The bytes of one idx file, plain or gzipped, checked against the known digest."""
    plain, packed = folder / name, folder / f"{name}.gz"
    path = plain if plain.exists() else packed
    try:
        with path.open("rb") if path is plain else gzip.open(path) as file:
            # No further than to see that there is more: a small file can unpack to any size.
            content = file.read(LONGEST_BYTES + 1)
    except FileNotFoundError:
        raise DataError(f"{packed}: no such file; the folder must hold {', '.join(DIGESTS)} (plain or .gz)") from None
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path}: cannot be decoded ({error}); remove it and run again") from None
    found = hashlib.sha256(content).hexdigest()
    if found != DIGESTS[name]:
        raise DataError(f"{path}: SHA-256 of the decoded content is {found}, expected {DIGESTS[name]}; remove it and run again")
    return content


def _images(content: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.frombuffer(content, np.uint8, offset=16).reshape(-1, 1, 28, 28)


def _labels(content: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.frombuffer(content, np.uint8, offset=8).astype(np.int64)
