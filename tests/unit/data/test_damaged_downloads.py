"""Downloads that are damaged, or of which a part is missing."""

import shutil
from pathlib import Path

import pytest

from pipeline import files
from pipeline.config import DataError
from pipeline.data import Request, fashion_mnist
from tests.unit.data.test_data import idx_files

MISSING = "train-images-idx3-ubyte.gz"


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
