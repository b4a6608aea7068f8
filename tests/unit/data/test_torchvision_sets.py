"""CIFAR, STL-10, SVHN and the MNISTs from small files in the format of the true ones, whose digests take the place of theirs."""

import bz2
import hashlib
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat
from torchvision import datasets

from pipeline import data, prepare
from pipeline.config import Config, DataError
from pipeline.data import store
from pipeline.files import Paths
from tests.kit.experiment import settings

CLASSES = ["airplane", "car", "bird"]


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def cifar(coarse: bool) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """The files of a small CIFAR, its training images as [N, 32, 32, 3] and their labels."""
    random = np.random.default_rng(0)
    files, images, labels = {}, [], []
    key = "fine_labels" if coarse else "labels"
    names = ["train", "test"] if coarse else [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name in names:
        rows, found = random.integers(0, 256, (40, 3072), dtype=np.uint8), random.integers(0, 3, 40).tolist()
        files[name] = pickle.dumps({"data": rows, key: found, "batch_label": name})
        images.append(rows.reshape(-1, 3, 32, 32))
        labels += found
    files["meta" if coarse else "batches.meta"] = pickle.dumps({"fine_label_names" if coarse else "label_names": CLASSES})
    return files, np.concatenate(images[:-1]), np.array(labels[:-40])


def stl() -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """The files of a small STL-10, which has columns before rows and counts from 1."""
    random = np.random.default_rng(1)
    images = {name: random.integers(0, 256, (count, 3, 96, 96), dtype=np.uint8) for name, count in (("train", 60), ("test", 30))}
    labels = {name: random.integers(0, 3, len(found), dtype=np.uint8) for name, found in images.items()}
    files = {f"{name}_X.bin": found.transpose(0, 1, 3, 2).tobytes() for name, found in images.items()}
    files |= {f"{name}_y.bin": (found + 1).tobytes() for name, found in labels.items()}
    files |= {"unlabeled_X.bin": bytes(3 * 96 * 96), "class_names.txt": "\n".join(CLASSES).encode()}
    return files, images["train"], labels["train"]


def packed(files: dict[str, bytes], base: str) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{base}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return found.getvalue()


@pytest.fixture(params=["cifar10", "cifar100", "stl10"])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any, dict[str, bytes], bytes, Any, Any]:
    """A data set of three classes: its name, torchvision's class with its digests, its files, its archive, training images and labels."""
    name = request.param
    kind: Any = getattr(datasets, name.upper())
    files, images, labels = stl() if name == "stl10" else cifar(coarse=name == "cifar100")
    archive = packed(files, kind.base_folder)
    for group in ("train_list", "test_list"):
        monkeypatch.setattr(kind, group, [[file, md5(files[file])] for file, _ in getattr(kind, group)])
    if name != "stl10":
        monkeypatch.setattr(kind, "meta", kind.meta | {"md5": md5(files[kind.meta["filename"]])})
    monkeypatch.setattr(kind, "tgz_md5", md5(archive))
    return name, kind, files, archive, images, labels


def unpack(kind: Any, files: dict[str, bytes], root: Path) -> Path:
    folder = root / kind.base_folder
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_unpacked_files_and_an_archive_give_the_same_images_and_the_folder_stays_as_it_is(known, tmp_path: Path) -> None:
    name, kind, files, archive, images, labels = known
    unpack(kind, files, tmp_path / "unpacked")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / kind.filename).write_bytes(archive)
    (tmp_path / "kept" / name).mkdir(parents=True)
    (tmp_path / "kept" / name / kind.filename).write_bytes(archive)
    roots = (tmp_path / "unpacked", tmp_path / "packed", None)
    for root in roots:
        downloads = tmp_path / ("kept" if root is None else f"downloads of {root.name}")
        raw = data.load(name, data.Request(root, downloads, 1, None))
        assert raw.class_names == CLASSES
        assert np.array_equal(raw.train.images, images)
        assert np.array_equal(raw.train.labels, labels)
        assert raw.train.images.dtype == np.uint8
        assert raw.train.labels.dtype == np.int64
        assert len(raw.test.labels) == (30 if name == "stl10" else 40)
    assert [path.name for path in (tmp_path / "packed").iterdir()] == [kind.filename]


def test_they_are_prepared_like_any_other(known, tmp_path: Path) -> None:
    name, kind, files, *_ = known
    unpack(kind, files, tmp_path / "raw")
    prepare.run(Config.model_validate(settings(data={"name": name, "root": "raw"})), Paths(tmp_path / "params.yaml"))
    manifest = store.read_manifest(tmp_path / "data" / "prepared")
    assert manifest.shape == ((3, 96, 96) if name == "stl10" else (3, 32, 32))
    assert manifest.class_names == CLASSES


@pytest.mark.parametrize("how", ["one byte", "cut", "missing"])
@pytest.mark.fault(12, "a raw file of CIFAR or STL-10 that is damaged or missing")
def test_a_file_that_is_not_the_known_one_is_refused_in_one_line(known, how: str, tmp_path: Path) -> None:
    name, kind, files, *_ = known
    file = unpack(kind, files, tmp_path / "raw") / kind.train_list[0][0]
    content = file.read_bytes()
    file.write_bytes(content[:-1] if how == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    if how == "missing":
        file.unlink()
    with pytest.raises(DataError) as said:
        data.load(name, data.Request(tmp_path / "raw", tmp_path / "downloads", 1, None))
    assert str(said.value).startswith(f"{tmp_path / 'raw'}: {name} is not there, or not as it is known (")
    assert f"put {kind.filename} there" in str(said.value)
    assert "\n" not in str(said.value)


def test_a_damaged_archive_is_not_unpacked_and_no_network_is_one_line(known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, kind, _, archive, *_ = known
    # Nobody listens there.
    monkeypatch.setattr(kind, "url", f"http://127.0.0.1:9/{kind.filename}")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / kind.filename).write_bytes(archive[:-1])
    for root, said in ((tmp_path / "raw", "is not the known archive"), (None, f"{name} is not there, or not as it is known")):
        with pytest.raises(DataError, match=said):
            data.load(name, data.Request(root, tmp_path / "downloads", 1, None))
    assert (tmp_path / "raw" / kind.filename).read_bytes() == archive[:-1]
    assert not (tmp_path / "downloads" / name / kind.base_folder).exists()


def test_a_root_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.root: .*nowhere is not a folder; name one with cifar-10-python.tar.gz, or set root: null"):
        data.load("cifar10", data.Request(tmp_path / "nowhere", tmp_path / "downloads", 1, None))


@pytest.mark.fault(13, "an archive with ../ in a name")
def test_an_archive_that_would_write_elsewhere_is_not_unpacked(known, tmp_path: Path) -> None:
    name, kind, files, *_ = known
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / kind.filename).write_bytes(packed(files | {"../../../escaped": b"here"}, kind.base_folder))
    with pytest.raises(DataError, match="is not the known archive; remove it"):
        data.load(name, data.Request(tmp_path / "raw", tmp_path / "downloads", 1, None))
    assert not [*tmp_path.rglob("escaped")]
    assert not [path for path in (tmp_path / "downloads").rglob("*") if path.is_file() and not path.name.endswith(".lock")]


def idx(array: np.ndarray) -> bytes:
    """As MNIST's files have it: the type, the number of dimensions and their sizes before the bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def mnist(folder: Path, images: dict[str, np.ndarray], labels: dict[str, np.ndarray], name: str) -> None:
    raw = folder / name.upper() / "raw"
    raw.mkdir(parents=True)
    for split, prefix in (("train", "train"), ("test", "t10k")):
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images[split]))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels[split].astype(np.uint8)))


def usps(folder: Path, images: dict[str, np.ndarray], labels: dict[str, np.ndarray], _: str) -> None:
    for split, name in (("train", "usps.bz2"), ("test", "usps.t.bz2")):
        rows = zip(labels[split] + 1, images[split].reshape(len(labels[split]), -1) / 255 * 2 - 1, strict=True)
        text = "\n".join(f"{label} " + " ".join(f"{at}:{value:.9f}" for at, value in enumerate(row, 1)) for label, row in rows)
        (folder / name).write_bytes(bz2.compress(text.encode()))


def svhn(folder: Path, images: dict[str, np.ndarray], labels: dict[str, np.ndarray], _: str) -> None:
    for split in ("train", "test"):
        # Zeros are tens there.
        numbers = np.where(labels[split] == 0, 10, labels[split])[:, None].astype(np.uint8)
        savemat(folder / f"{split}_32x32.mat", {"X": images[split].transpose(2, 3, 1, 0), "y": numbers})


DIGITS = [("mnist", mnist, (28, 28)), ("kmnist", mnist, (28, 28)), ("usps", usps, (16, 16)), ("svhn", svhn, (3, 32, 32))]


@pytest.mark.parametrize(("name", "write", "shape"), DIGITS)
def test_digits_and_letters_are_read_from_their_own_files(
    name: str, write: Any, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(2)
    images = {split: random.integers(0, 256, (count, *shape), dtype=np.uint8) for split, count in (("train", 60), ("test", 30))}
    labels = {split: np.arange(len(found)) % 10 for split, found in images.items()}
    (tmp_path / "raw").mkdir()
    write(tmp_path / "raw", images, labels, name)
    if name == "svhn":
        digests = {split: md5((tmp_path / "raw" / f"{split}_32x32.mat").read_bytes()) for split in images}
        listed = {split: [url, file, digests[split]] for split, (url, file, _) in datasets.SVHN.split_list.items() if split in digests}
        monkeypatch.setattr(datasets.SVHN, "split_list", listed)
    raw = data.load(name, data.Request(tmp_path / "raw", tmp_path / "downloads", 1, None))
    known = {"kmnist": datasets.KMNIST.classes, "mnist": datasets.MNIST.classes}
    assert raw.class_names == known.get(name, [*"0123456789"])
    for split, found in (("train", raw.train), ("test", raw.test)):
        expected = images[split].reshape(len(found.labels), -1, *shape[-2:])
        assert found.images.dtype == np.uint8
        assert np.abs(found.images.astype(int) - expected).max() <= (1 if name == "usps" else 0)
        assert found.labels.tolist() == labels[split].tolist()
    config = Config.model_validate(settings(data={"name": name, "root": "raw"}))
    assert prepare.run(config, Paths(tmp_path / "params.yaml")) == 0
    files = f"{name.upper()}/raw with the unpacked files" if "mnist" in name else "its files"
    with pytest.raises(DataError, match=rf"{name} is not there, or not as it is known \(.*\); put {files} there, or"):
        data.load(name, data.Request(tmp_path, tmp_path / "downloads", 1, None))
    if name == "usps":
        os.truncate(tmp_path / "raw" / "usps.bz2", 500)
        with pytest.raises(DataError, match="usps is not there, or not as it is known"):
            data.load(name, data.Request(tmp_path / "raw", tmp_path / "downloads", 1, None))
