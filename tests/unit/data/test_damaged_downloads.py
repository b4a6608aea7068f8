"""Downloads that are damaged, or of which a part is missing."""

import bz2
import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision import datasets

from pipeline import data, files
from pipeline.config import DataError
from pipeline.data import Request, fashion_mnist
from tests.unit.data.test_data import idx_files
from tests.unit.data.test_torchvision_sets import DIGITS, idx

MISSING = "train-images-idx3-ubyte.gz"
# What a file of MNIST's or USPS's may hold instead of its content, which is the argument.
DAMAGE: dict[str, Any] = {
    "empty": lambda _: b"",
    "header only": lambda content: content[:16],
    "cut": lambda content: content[:-7],
    "of an unknown type": lambda content: content[:2] + b"\x0a" + content[3:],
    "another format": lambda _: b"x" * 500,
    "of fewer images": lambda _: idx(np.zeros((5, 28, 28), np.uint8)),
    "too long": lambda content: content + content,
    "text": lambda _: bz2.compress(b"1 1:0.5\n\n"),
    "no images": lambda _: bz2.compress(b""),
}


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for what torchvision's mirrors have."""

    def fetch(scratch: Path) -> Path:
        """the mirror."""
        if not mirror.exists():
            raise OSError("nobody answers")
        return Path(shutil.copytree(mirror, scratch / "raw"))

    mirror = tmp_path / "mirror"
    idx_files(mirror, 5)
    monkeypatch.setattr(fashion_mnist, "_from_mirrors", fetch)
    monkeypatch.setattr(fashion_mnist, "_from_debian", fetch)
    monkeypatch.setattr(fashion_mnist, "INSTALLED", tmp_path / "installed")
    return mirror


@pytest.mark.parametrize("name", [f"{name}.gz" for name in fashion_mnist.DIGESTS])
def test_a_file_of_fashion_mnist_that_was_removed_is_downloaded_again(name: str, mirror: Path, tmp_path: Path) -> None:
    downloads = tmp_path / "raw" / "fashion-mnist"
    assert fashion_mnist.find(downloads) == downloads
    (downloads / name).unlink()
    assert fashion_mnist.find(downloads) == downloads
    assert {path.name: path.read_bytes() for path in downloads.iterdir()} == {path.name: path.read_bytes() for path in mirror.iterdir()}
    assert [path.name for path in downloads.parent.iterdir()] == ["fashion-mnist"]


def test_what_is_complete_is_not_downloaded_again_and_no_network_leaves_the_rest(mirror: Path, tmp_path: Path) -> None:
    downloads = tmp_path / "raw" / "fashion-mnist"
    fashion_mnist.find(downloads)
    shutil.rmtree(mirror)
    (downloads / MISSING).rename(downloads / Path(MISSING).stem)
    assert fashion_mnist.find(downloads) == downloads
    (downloads / Path(MISSING).stem).unlink()
    with pytest.raises(DataError, match=r"Fashion-MNIST was not found in .*; the mirror \(nobody answers\).* Set data.root to a folder"):
        fashion_mnist.find(downloads)
    assert len([*downloads.iterdir()]) == 3


def test_a_file_that_is_missing_where_it_is_not_ours_is_named(mirror: Path, tmp_path: Path) -> None:
    (mirror / MISSING).unlink()
    shutil.copytree(mirror, tmp_path / "installed")
    for root in (mirror, None):
        with pytest.raises(DataError, match=rf"{MISSING}: no such file"):
            fashion_mnist.load(Request(root, tmp_path / "raw", 1, None))
    assert not (tmp_path / "raw").exists()


def test_a_download_is_on_the_disk_before_it_is_in_its_place(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads, synced = tmp_path / "raw" / "fashion-mnist", list[str]()

    def fsync(path: Path) -> None:
        if not downloads.exists():
            synced.append(path.name)

    monkeypatch.setattr(files, "fsync_path", fsync)
    fashion_mnist.find(downloads)
    assert {f"{name}.gz" for name in fashion_mnist.DIGESTS} <= {*synced}


@pytest.mark.parametrize("name", ["mnist", "kmnist", "usps"])
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.fault(12, "a raw file of MNIST or USPS that is damaged")
def test_a_damaged_file_of_digits_is_one_line_and_removing_it_downloads_it(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody listens there.
    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    monkeypatch.setattr(datasets.KMNIST, "mirrors", ["http://127.0.0.1:9/"])
    nowhere = {split: ["http://127.0.0.1:9/x", file, digest] for split, (_, file, digest) in datasets.USPS.split_list.items()}
    monkeypatch.setattr(datasets.USPS, "split_list", nowhere)
    write, shape = next(found for one, *found in DIGITS if one == name)
    folder = tmp_path / "raw" / name
    folder.mkdir(parents=True)
    labels = {"train": np.arange(60) % 10, "test": np.arange(30) % 10}
    write(folder, {split: np.zeros((len(found), *shape), np.uint8) for split, found in labels.items()}, labels, name)
    raw = folder / name.upper() / "raw"
    file = folder / "usps.bz2" if name == "usps" else raw / "train-images-idx3-ubyte"
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    ours, not_ours = Request(None, tmp_path / "raw", 1, None), Request(folder, tmp_path / "raw", 1, None)
    with pytest.raises(DataError, match=rf"^{folder}: {name} is not there, or not as it is known \(.+\); put .* there, or") as said:
        data.load(name, not_ours)
    assert "\n" not in str(said.value)
    with pytest.raises(DataError, match=rf"^{file if name == 'usps' else raw}: is not as it is known \(.+\); remove it and run again$"):
        data.load(name, ours)
    file.unlink()
    with pytest.raises(DataError, match=rf"{name} is not there, or .*\((Error downloading|<urlopen error).*; put .* there, or"):
        data.load(name, ours)


def test_what_the_disk_cannot_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(datasets.MNIST, "_load_data", fail)
    raw = tmp_path / "raw" / "mnist" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for packed, _ in datasets.MNIST.resources:
        (raw / Path(packed).stem).touch()
    with pytest.raises(DataError, match=r"mnist is not there, or not as it is known \(\[Errno 5\] Input/output error\); put"):
        data.load("mnist", Request(None, tmp_path / "raw", 1, None))
