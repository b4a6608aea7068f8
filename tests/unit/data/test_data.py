"""Data: found, checked, packed, ordered and augmented; every byte is what prepare wrote."""

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline import data, prepare
from pipeline.config import Config, ConfigError, DataError
from pipeline.data import Split, augment, fashion_mnist, store
from pipeline.data.batches import Batches, Pixels
from pipeline.data.order import Order
from pipeline.files import Paths
from tests.kit.experiment import make_job, settings


def test_prepare_is_repeatable_and_keeps_the_test_images_apart(tmp_path: Path) -> None:
    first, second = (make_job(tmp_path / name) for name in ("a", "b"))
    manifest = store.read_manifest(first.prepared)
    assert manifest == store.read_manifest(second.prepared)
    assert manifest.counts == {"train": 1080, "validation": 120, "test": 600}
    raw = data.load("synthetic:1200", data.Request(None, tmp_path, 1, "1200"))
    kept = [store.open_split(first.prepared, name) for name in ("train", "validation")]
    together = np.concatenate([split.images for split in kept])
    assert sorted(image.tobytes() for image in together) == sorted(image.tobytes() for image in raw.train.images)
    assert np.array_equal(store.open_split(first.prepared, "test").images, raw.test.images)


def test_a_size_behind_a_name_takes_the_first_training_images_and_leaves_the_test_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = data.load("synthetic:300", data.Request(None, tmp_path, 1, "300"))
    monkeypatch.setattr("pipeline.data.synthetic.load", lambda _: whole)
    few = data.load("synthetic:120", data.Request(None, tmp_path, 1, "120"))
    assert np.array_equal(few.train.images, whole.train.images[:120])
    assert np.array_equal(few.train.labels, whole.train.labels[:120])
    assert few.test is whole.test
    with pytest.raises(DataError, match=r"data.name: 'synthetic:301': there are 300 training images; set that or a smaller number"):
        data.load("synthetic:301", data.Request(None, tmp_path, 1, "301"))
    for wrong in ("fashion-mnist:", "fashion-mnist:99", "fashion-mnist:many"):
        with pytest.raises(ConfigError, match=r"must be a whole number of at least 100, such as fashion-mnist:2018"):
            data.check(wrong)
    data.check("fashion-mnist:6000")


def test_another_seed_holds_out_other_images() -> None:
    names = np.arange(1000)
    held = []
    for seed in (1, 1, 2):
        kept, out = prepare._hold_out(Split(names.astype(np.uint8), names), 0.1, seed)
        assert sorted([*kept.labels, *out.labels]) == names.tolist()
        held.append(set(out.labels.tolist()))
    assert held[0] == held[1]
    # Of two draws of a tenth, a tenth is in both.
    assert len(held[0]) == 100
    assert len(held[0] & held[2]) < 30


def test_a_source_is_known_as_the_same_whatever_the_seed_holds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = data.load("synthetic:1200", data.Request(None, tmp_path, 1, "1200"))
    found = []
    for source in (drawn, replace(drawn, depends_on_seed=False), replace(drawn, depends_on_seed=False, test=drawn.train)):
        monkeypatch.setattr("pipeline.data.synthetic.load", lambda _, source=source: source)
        for seed in (1, 2):
            folder = tmp_path / str(len(found))
            prepare.run(Config.model_validate(settings(seed=seed)), Paths(folder / "params.yaml"))
            found.append(store.read_manifest(folder / "data" / "prepared").identity)
    assert len({one["prepared data"] for one in found}) == 6
    first, second, third, fourth, fifth, sixth = (one["source data"] for one in found)
    assert first is second is None
    assert third is not None and third == fourth != fifth == sixth


@pytest.mark.parametrize("side", [12, 20, 40])
def test_resized_images_are_those_of_pillow(side: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 28, 28)).astype(np.uint8)
    resized = prepare.resize(images, side).astype(int)
    for image, mine in zip(images, resized, strict=True):
        theirs = Image.fromarray(image.transpose(1, 2, 0)).resize((side, side), Image.Resampling.BILINEAR)
        # Pillow rounds to a byte between rows and columns, too.
        assert np.abs(mine - np.asarray(theirs).astype(int).transpose(2, 0, 1)).max() <= 1


def test_mean_and_deviation_are_those_of_the_training_pixels(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    pixels = store.open_split(job.prepared, "train").images / 255
    manifest = store.read_manifest(job.prepared)
    assert manifest.mean == pytest.approx([pixels.mean()])
    assert manifest.std == pytest.approx([pixels.std()])


def test_data_that_were_made_for_other_settings_are_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    manifest = store.read_manifest(job.prepared)
    store.check_made_for(job.prepared, manifest, job.config)
    for change, part in (
        (("data", {"name": "synthetic:1300"}), "data.name: synthetic:1200, now it is synthetic:1300"),
        (("seed", 2), "seed: 1, now it is 2"),
        (("data", {"name": "synthetic:1200", "root": "elsewhere"}), "data.root: None, now it is elsewhere"),
    ):
        with pytest.raises(DataError, match=part):
            store.check_made_for(job.prepared, manifest, Config.model_validate(settings(**dict([change]))))


@pytest.mark.fault(12, "a prepared file flipped, cut, missing")
def test_one_flipped_bit_or_a_missing_file_is_found(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    manifest = store.read_manifest(job.prepared)
    store.verify(job.prepared, manifest, ("train", "validation", "test"))
    path = job.prepared / "train-images.npy"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path}: expected SHA-256 {manifest.sha256[path.name]}, found [0-9a-f]{{64}}"):
        store.verify(job.prepared, manifest, ("train",))
    store.verify(job.prepared, manifest, ("test",))
    path.unlink()
    with pytest.raises(DataError, match="found nothing"):
        store.verify(job.prepared, manifest, ("train",))


@pytest.mark.fault(13, "a label out of range")
def test_a_label_out_of_range_is_named(tmp_path: Path) -> None:
    split = Split(np.zeros((3, 1, 4, 4), np.uint8), np.array([0, 1, 7]))
    with pytest.raises(DataError, match="image 2 has label 7; there are 2 classes"):
        store.write(tmp_path / "prepared", {"data.name": "made"}, {"train": split}, ["a", "b"])
    assert list(tmp_path.iterdir()) == []


def idx_files(folder: Path, count: int) -> None:
    """Small files in the true format of Fashion-MNIST."""
    folder.mkdir()
    for name in fashion_mnist.DIGESTS:
        body = np.arange(count * (784 if "images" in name else 1)).astype(np.uint8) % 10
        header = struct.pack(">IIII", 2051, count, 28, 28) if "images" in name else struct.pack(">II", 2049, count)
        (folder / f"{name}.gz").write_bytes(gzip.compress(header + body.tobytes()))


@pytest.mark.fault(12, "a raw file of other content, cut, missing")
def test_other_content_is_refused_and_named(tmp_path: Path) -> None:
    idx_files(tmp_path / "raw", 5)
    request = data.Request(tmp_path / "raw", tmp_path, 1, None)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: SHA-256 .* is [0-9a-f]{64}, expected c59f468a"):
        fashion_mnist.load(request)
    (tmp_path / "raw" / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b cut off")
    with pytest.raises(DataError, match="cannot be decoded"):
        fashion_mnist.load(request)
    (tmp_path / "raw" / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(DataError, match="no such file"):
        fashion_mnist.load(request)


def test_files_in_the_true_format_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    idx_files(tmp_path / "raw", 5)
    found = {
        name: hashlib.sha256(gzip.decompress((tmp_path / "raw" / f"{name}.gz").read_bytes())).hexdigest() for name in fashion_mnist.DIGESTS
    }
    monkeypatch.setattr(fashion_mnist, "DIGESTS", found)
    raw = fashion_mnist.load(data.Request(tmp_path / "raw", tmp_path, 1, None))
    assert raw.train.images.shape == (5, 1, 28, 28)
    assert raw.test.labels.tolist() == [0, 1, 2, 3, 4]
    assert raw.train.images[1, 0, 0].tolist() == [value % 256 % 10 for value in range(784, 812)]
    for packed in (tmp_path / "raw").glob("*.gz"):
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    assert np.array_equal(fashion_mnist.load(data.Request(tmp_path / "raw", tmp_path, 1, None)).train.images, raw.train.images)


@pytest.mark.slow
def test_fashion_mnist_is_found_without_being_told_where(tmp_path: Path) -> None:
    """From Debian's package, torchvision's mirrors or Debian's archive, whichever this machine reaches."""
    paths = Paths(tmp_path / "params.yaml")
    assert prepare.run(Config.model_validate(settings(data={"name": "fashion-mnist"})), paths) == 0
    assert store.read_manifest(paths.prepared).counts == {"train": 54000, "validation": 6000, "test": 10000}


def test_every_sample_is_taken_at_most_once_an_epoch_in_another_order_each() -> None:
    order = Order(seed=5, count=103, global_batch=20, pieces=4)
    epochs = [
        torch.cat([order.lane(step, lane) for step in range(5 * epoch, 5 * epoch + 5) for lane in range(4)]).tolist() for epoch in range(3)
    ]
    assert all(len(set(epoch)) == 100 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = Order(seed=5, count=103, global_batch=20, pieces=2)
    assert again.lane(7, 1).tolist() == torch.cat([order.lane(7, 2), order.lane(7, 3)]).tolist()


@pytest.mark.parametrize("own", [range(4), range(1, 3)])
def test_batches_read_ahead_are_those_in_memory(own: range, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    manifest, split = store.read_manifest(job.prepared), store.open_split(job.prepared, "train")
    order = Order(1, len(split.labels), 96, 4)
    pixels = Pixels(manifest.mean, manifest.std, torch.device("cpu"))
    made = [Batches(split, order, augment.build("crop-flip", 1, len(split.labels), manifest.mean), pixels, hold) for hold in (True, False)]
    made[1].own = own
    for step in (0, 1, 2, 10, 11, 12):
        for lane in own:
            (images, labels), (same_images, same_labels) = (batches.lane(step, lane) for batches in made)
            assert torch.equal(images, same_images)
            assert torch.equal(labels, same_labels)
            assert images.shape == (24, 1, 28, 28)
