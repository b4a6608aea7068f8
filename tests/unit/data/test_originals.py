"""Image files that are kept as they are and decoded when they are read: the pixels of those that are packed."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import prepare
from pipeline.config import Config, DataError
from pipeline.data import Split, augment, store
from pipeline.data.batches import Batches, Pixels, resident
from pipeline.data.order import Order
from pipeline.data.originals import Originals
from pipeline.files import Paths
from tests.kit.experiment import settings
from tests.unit.data.test_imagefolder import fill, picture


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fill(tmp_path / "images", 30)
    picture(9).save(tmp_path / "images" / "cat" / "one.png")
    return tmp_path


def prepared(root: Path, **changes: Any) -> tuple[store.Manifest, dict[str, Split]]:
    config = Config.model_validate(settings(data={"name": "imagefolder", "root": "images", "image_size": 16} | changes))
    assert prepare.run(config, Paths(root / "params.yaml")) == 0
    store.check_made_for(root / "data" / "prepared", manifest := store.read_manifest(root / "data" / "prepared"), config)
    store.verify(root / "data" / "prepared", manifest, store.SPLITS)
    return manifest, {name: store.open_split(root / "data" / "prepared", name) for name in store.SPLITS}


def test_they_are_decoded_to_the_pixels_that_would_be_packed(root: Path) -> None:
    pixels, packed = prepared(root)
    arrays = {name: np.array(split.images) for name, split in packed.items()}
    manifest, kept = prepared(root, store="originals")
    assert manifest.digest != pixels.digest
    for field in ("mean", "std", "counts", "shape", "class_counts", "source_sha256", "class_names"):
        assert getattr(manifest, field) == getattr(pixels, field)
    random = np.random.default_rng(0)
    for name, expected in arrays.items():
        images = kept[name].images
        assert isinstance(images, Originals)
        assert (images.shape, images.dtype, images.ndim, len(images)) == (expected.shape, np.uint8, 4, len(expected))
        assert np.array_equal(images[:], expected)
        assert np.array_equal(images[1:3], expected[1:3])
        assert np.array_equal(images[len(expected) :], expected[:0])
        assert np.array_equal(images[0], expected[0])
        some = random.permutation(len(expected))
        assert np.array_equal(images[some], expected[some])
        assert np.array_equal(kept[name].labels, packed[name].labels)
    # The files themselves.
    sizes = [path.stat().st_size for path in sorted((root / "images").rglob("*.*g"))]
    found = [(root / "data" / "prepared" / f"{name}-originals.bin").stat().st_size for name in store.SPLITS]
    assert sum(found) == sum(sizes)


def test_batches_of_them_are_those_of_pixels(root: Path) -> None:
    manifest, packed = prepared(root)
    packed = {name: Split(np.array(split.images), np.array(split.labels)) for name, split in packed.items()}
    _, kept = prepared(root, store="originals")
    cpu = torch.device("cpu")
    assert resident([packed["train"], packed["validation"]], 2**30)
    assert not resident([packed["train"], kept["validation"]], 2**30)
    order, pixels = Order(1, len(packed["train"].labels), 16, 2), Pixels(manifest.mean, manifest.std, cpu)
    made = [
        Batches(split, order, augment.build("crop-flip", 1, len(split.labels), manifest.mean), pixels, hold)
        for split, hold in ((packed["train"], True), (kept["train"], False))
    ]
    made[1].own = range(2)
    for step in range(4):
        for lane in range(2):
            for one, other in zip(*(batches.lane(step, lane) for batches in made), strict=True):
                assert torch.equal(one, other)


def test_another_pillow_or_another_way_asks_for_prepare(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(root, store="originals")
    manifest = store.read_manifest(root / "data" / "prepared")
    path = root / "data" / "prepared"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store.originals, "version", lambda _: "0.1")
        for reads in (lambda: store.verify(path, manifest, ("test",)), lambda: store.open_split(path, "test")):
            with pytest.raises(DataError, match=r"has originals for Pillow .*, not originals for Pillow 0.1; install that Pillow, or run"):
                reads()
    for changes, found in (({"store": "originals"}, "Pillow 0.1"), ({}, "None")):
        monkeypatch.setattr(store.originals, "version", lambda _: "0.1")
        config = Config.model_validate(settings(data={"name": "imagefolder", "root": "images", "image_size": 16} | changes))
        with pytest.raises(DataError, match=rf"was made for data.store: originals for Pillow .*, now it is .*{found}; run: python -m"):
            store.check_made_for(root / "data" / "prepared", manifest, config)


def test_damage_is_found_at_the_start_and_while_it_is_read(root: Path) -> None:
    manifest, kept = prepared(root, store="originals")
    path = root / "data" / "prepared" / "train-originals.bin"
    with path.open("r+b") as file:
        file.write(bytes(2000))
    with pytest.raises(DataError, match=r"train-originals.bin: expected SHA-256"):
        store.verify(root / "data" / "prepared", manifest, store.SPLITS)
    with pytest.raises(DataError, match=r"train-originals.bin, image 0: cannot be decoded .*; run: python -m pipeline prepare"):
        kept["train"].images[:3]


@pytest.mark.parametrize("key", ["store", "allow_broken"])
def test_they_are_for_images_in_files(key: str) -> None:
    value: Any = {"store": "originals", "allow_broken": 3}[key]
    with pytest.raises(ValueError, match=rf"{key}: is for images in files, of data.name: imagefolder; set {key}: "):
        Config.model_validate({"data": {"name": "cifar10", key: value}})


@pytest.mark.parametrize("way", ["pixels", "originals"])
@pytest.mark.parametrize("killed_after", [None, 5, 40])
def test_broken_files_are_left_out_up_to_a_limit(way: str, killed_after: int | None, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, _ = prepared(root, store=way)
    for name in ("003.jpg", "021.jpg"):
        (root / "images" / "bird" / name).write_bytes(b"no image")
    data = {"allow_broken": 2, "store": way}
    if killed_after is not None:
        leave_half(root, killed_after)
    with pytest.raises(
        DataError, match=r"bird/003.jpg: cannot be decoded .*; as well as .*; 2 are broken, and data.allow_broken is 1; remove"
    ):
        prepared(root, store=way, allow_broken=1)
    caplog.clear()
    if killed_after is not None:
        leave_half(root, killed_after)
    with caplog.at_level("INFO"):
        manifest, splits = prepared(root, **data)
    assert ("are there already" in caplog.text) == (killed_after is not None)
    assert [line for line in caplog.messages if "left out" in line] == [
        f"{manifest.left_out[0]}; as well as {manifest.left_out[1].partition(': cannot')[0]}; left out, as data.allow_broken is 2"
    ]
    assert [line.split(": ")[0].split("/")[-1] for line in manifest.left_out] == ["003.jpg", "021.jpg"]
    assert sum(manifest.counts.values()) == sum(before.counts.values()) - 2
    assert sum(map(sum, manifest.class_counts.values())) == sum(manifest.counts.values())
    found = {name: np.array(split.images) for name, split in splits.items()}
    # The same as without them.
    for name in ("003.jpg", "021.jpg"):
        (root / "images" / "bird" / name).unlink()
    without, splits = prepared(root, store=way)
    assert without.digest == manifest.digest
    assert all(np.array_equal(found[name], np.array(split.images)) for name, split in splits.items())
    assert not [*(root / "data").glob(".decoding-*")]


@pytest.mark.parametrize("left", ["all", "all.broken"])
def test_half_of_what_a_decoder_left_is_not_taken(left: str, root: Path) -> None:
    (root / "images" / "bird" / "003.jpg").write_bytes(b"no image")
    leave_half(root, 40)
    (scratch,) = (root / "data").glob(".decoding-*")
    for path in scratch.iterdir():
        if path.name != left:
            path.unlink()
    manifest, splits = prepared(root, allow_broken=1)
    assert len(manifest.left_out) == 1
    assert all(image.any() for split in splits.values() for image in split.images)


def leave_half(root: Path, count: int) -> None:
    """What a prepare leaves that was killed after so many images."""
    from pipeline.data import decoding
    from pipeline.data.image_files import class_folders, files_of

    classes = class_folders(root / "images")
    found = {"all": files_of(root / "images", root / "images", classes)}
    decoded = decoding.Decoded(root / "data", root / "images", 16, found, 2)
    split = decoded.split("all")
    assert len(split.labels) == 61 - len(decoded.left_out)
    (scratch,) = (root / "data").glob(".decoding-*")
    os.truncate(scratch / "all", count * 3 * 16 * 16)
