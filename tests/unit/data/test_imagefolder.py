"""Images in folders: every format that people have, the order, the splits, and what is refused."""

import logging
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline import data, prepare
from pipeline.config import Config, ConfigError, DataError
from pipeline.data import decoding, store
from pipeline.files import Paths
from tests.kit.experiment import settings

CLASSES = ["bird", "cat"]


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Something smooth in colours, which JPEG keeps."""
    rows, columns = np.mgrid[0:height, 0:width]
    random = np.random.default_rng(seed)
    waves = [128 + 100 * np.sin(columns / 9 * random.random() + rows / 7 + random.random() * 6) for _ in range(3)]
    return Image.fromarray(np.stack(waves, axis=2).astype(np.uint8))


def fill(folder: Path, count: int, first: int = 0) -> None:
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            seed = first + 100 * number + index
            picture(seed, 40 + seed % 7, 30 + seed % 5).save(folder / name / f"{index:03}.jpg")


def request(root: Path | None, side: int | None = 16, seed: int = 1) -> data.Request:
    return data.Request(root, Path("nowhere"), seed, None, "", side, root.parent if root else None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fill(tmp_path / "images" / "train", 6)
    fill(tmp_path / "images" / "test", 2, 50)
    return tmp_path / "images"


def test_every_image_is_upright_square_and_in_its_class(root: Path) -> None:
    raw = data.load("imagefolder", request(root))
    assert raw.class_names == CLASSES
    assert raw.train.images.shape == (12, 3, 16, 16)
    assert raw.train.labels.tolist() == [0] * 6 + [1] * 6
    assert raw.test.labels.tolist() == [0, 0, 1, 1]
    # What PIL itself makes of the middle.
    with Image.open(root / "train" / "cat" / "002.jpg") as file:
        width, height = file.size
        left = (width - height) // 2
        by_hand = np.asarray(file.resize((16, 16), Image.Resampling.BICUBIC, (left, 0, left + height, height))).transpose(2, 0, 1)
    assert np.abs(raw.train.images[8].astype(int) - by_hand).mean() < 3


def test_the_order_is_that_of_names_and_no_matter_of_the_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = data.load("imagefolder", request(root))
    walk = os.walk

    def backwards(folder: Path, onerror: Callable[[OSError], object]):
        for at, folders, names in walk(folder, onerror=onerror):
            yield at, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    # In processes of their own.
    monkeypatch.setattr(decoding, "CHUNK", 2)
    for cpus in (1, 3):
        monkeypatch.setattr(decoding, "usable_cpus", lambda cpus=cpus: cpus)
        again = data.load("imagefolder", request(root))
        assert all(
            np.array_equal(one, other) for one, other in zip((*before.train, *before.test), (*again.train, *again.test), strict=True)
        )


@pytest.mark.parametrize(("names", "has"), [(("val",), False), (("val", "test"), True), (("validation", "test"), True), (("test",), False)])
def test_the_folders_that_are_there_are_the_splits(names: tuple[str, ...], has: bool, tmp_path: Path) -> None:
    for number, name in enumerate(("train", *names)):
        fill(tmp_path / "images" / name, 12 - 4 * number, 30 * number)
    prepare.run(
        Config.model_validate(settings(data={"name": "imagefolder", "root": "images", "image_size": 16})), Paths(tmp_path / "params.yaml")
    )
    manifest = store.read_manifest(tmp_path / "data" / "prepared")
    # ImageNet's val is what people test on.
    expected = {"train": 24, "validation": 16, "test": 8} if has else {"train": 22, "validation": 2, "test": 16}
    assert manifest.counts == expected
    assert manifest.class_names == CLASSES


def test_without_train_a_tenth_of_each_class_is_held_out_by_the_seed(tmp_path: Path) -> None:
    fill(tmp_path / "images", 60)
    first, again, other = (data.load("imagefolder", request(tmp_path / "images", seed=seed)) for seed in (1, 1, 2))
    assert all(2 <= count <= 12 for count in np.bincount(first.test.labels))
    assert (np.bincount(first.test.labels) + np.bincount(first.train.labels)).tolist() == [60, 60]
    assert np.array_equal(first.test.images, again.test.images)
    assert not np.array_equal(first.test.images, other.test.images)
    assert not {one.tobytes() for one in first.train.images} & {one.tobytes() for one in first.test.images}
    # The images are the same ones.
    assert first.source_sha256 == other.source_sha256
    (tmp_path / "images" / "cat" / "000.jpg").unlink()
    assert data.load("imagefolder", request(tmp_path / "images")).source_sha256 != first.source_sha256


@pytest.mark.parametrize("count", [2, 9, 30])
def test_what_was_trained_on_is_never_tested_on_when_more_images_are_there(tmp_path: Path, count: int) -> None:
    fill(tmp_path / "images", count)
    before = data.load("imagefolder", request(tmp_path / "images"))
    trained = {one.tobytes() for one in before.train.images}
    assert np.bincount(before.test.labels).min() >= 1
    fill(tmp_path / "images", 2 * count, 0)
    after = data.load("imagefolder", request(tmp_path / "images"))
    assert len(after.train.labels) + len(after.test.labels) == 4 * count
    assert not trained & {one.tobytes() for one in after.test.images}


def bomb(path: Path) -> None:
    """A PNG that says it has 60,000 x 60,000 pixels."""
    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    chunks = [struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def strange(folder: Path, name: bytes) -> Path:
    return Path(os.fsdecode(os.fsencode(folder) + b"/" + name))


def second(folder: Path) -> None:
    (folder.parents[1] / "val").mkdir()
    (folder.parents[1] / "validation").mkdir()


def nested(folder: Path) -> None:
    (folder / "000.jpg").unlink()
    (folder / "000.jpg").mkdir()
    (folder / "000.jpg" / "inner.jpg").write_bytes(b"")


def linked(folder: Path) -> None:
    picture(1).save(folder.parents[2] / "secret.png")
    (folder / "link.png").symlink_to(folder.parents[2] / "secret.png")


# What is done to the folder of the cats.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda cat: os.truncate(cat / "000.jpg", 500),
    "text": lambda cat: (cat / "000.jpg").write_text("no image"),
    # What Pillow would hand to Ghostscript.
    "postscript": lambda cat: (cat / "000.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n"),
    "notes": lambda cat: (cat / "notes.txt").write_text("by hand"),
    "empty": lambda cat: (cat.parent / "dog").mkdir(),
    "pixel": lambda cat: picture(1, 1, 1).save(cat / "one.png"),
    "huge": lambda cat: bomb(cat / "huge.png"),
    "link": linked,
    "dangling": lambda cat: (cat / "gone.png").symlink_to(cat / "nothing.png"),
    "folder": nested,
    "case": lambda cat: (cat.parent / "Cat").mkdir(),
    "bytes": lambda cat: strange(cat.parent, b"caf\xe9").mkdir(),
    "strange name": lambda cat: strange(cat, b"\xff.jpg").write_bytes(b""),
    "beside": lambda cat: (cat.parent / "list.csv").write_text("1,cat"),
    "linked folder": lambda cat: (cat / "more").symlink_to(cat.parent / "bird"),
    "linked class": lambda cat: (cat.parent / "owl").symlink_to(cat.parent / "bird"),
    "a pipe": lambda cat: os.mkfifo(cat / "pipe.jpg"),
    "two of one split": second,
    "another class": lambda cat: (cat.parents[1] / "test" / "dog").mkdir(),
}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut", r"train/cat/000.jpg: cannot be decoded \(.*[Tt]runcated.*\); remove or replace it"),
        ("text", r"train/cat/000.jpg: cannot be decoded \(cannot identify image file"),
        ("postscript", r"train/cat/000.jpg: cannot be decoded \(cannot identify image file"),
        ("notes", r"train/cat/notes.txt: is no image by its name \(.jpg, "),
        ("empty", r"train/dog: has no image; add some, or remove the folder"),
        ("pixel", r"train/cat/one.png: has 1 x 1 pixels; 2 a side"),
        ("huge", r"train/cat/huge.png: (has 60000 x 60000 pixels|cannot be decoded \(Image size)"),
        ("link", r"train/cat/link.png: links out of .*images; copy what it links to"),
        ("dangling", r"train/cat/gone.png: cannot be decoded \(.*No such file"),
        ("folder", r"train/cat/000.jpg/inner.jpg: cannot be decoded"),
        ("case", r"train: Cat and cat differ in case alone"),
        ("bytes", r"train/caf\\xe9: the name of a class must be UTF-8"),
        ("strange name", r"train/cat/\\xff.jpg: cannot be decoded"),
        ("beside", r"train/list.csv: is not the folder of a class; move it out of .*train"),
        ("linked folder", r"train/cat/more: a link to a folder is not followed"),
        ("linked class", r"train/owl: is not the folder of a class"),
        ("a pipe", r"train/cat/pipe.jpg: is no file that can be read"),
        ("two of one split", r"images: has val/ and validation/, which are the same split"),
        ("another class", r"test: dog is no class of .*train; it has bird, cat"),
    ],
)
@pytest.mark.fault(13, "an image, a name or a folder of one's own data set that cannot be used")
def test_what_cannot_be_an_image_is_named_in_one_line_and_nothing_is_written(how: str, said: str, root: Path, tmp_path: Path) -> None:
    DAMAGE[how](root / "train" / "cat")
    config = Config.model_validate(settings(data={"name": "imagefolder", "root": "images", "image_size": 16}))
    with pytest.raises(DataError, match=said) as error:
        prepare.run(config, Paths(tmp_path / "params.yaml"))
    assert "\n" not in str(error.value)
    str(error.value).encode()
    assert not [*(tmp_path / "data").rglob("*")]


def test_several_broken_images_are_counted(root: Path) -> None:
    for name in ("000.jpg", "003.jpg", "004.jpg"):
        (root / "train" / "cat" / name).write_bytes(b"")
    with pytest.raises(
        DataError, match=r"train/cat/000.jpg: cannot be decoded .*; as well as .*train/cat/003.jpg, .*train/cat/004.jpg; 3 are broken, and"
    ):
        data.load("imagefolder", request(root))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "data.root: .*images is not a folder"),
        (lambda folder: folder.mkdir(), "images: has no folder; put the images of each class into one with its name"),
        (lambda folder: fill(folder / "train", 2), r"has train/ and neither test/ nor val/"),
        (
            lambda folder: fill(folder / "Training", 2),
            "Training is the name of a split and no class",
        ),
        (lambda folder: fill(folder, 1), "images/bird: one image cannot be both trained on and tested"),
    ],
)
def test_a_folder_that_is_no_data_set_is_told_what_it_needs(make, said: str, tmp_path: Path) -> None:
    make(tmp_path / "images")
    with pytest.raises(DataError, match=said):
        data.load("imagefolder", request(tmp_path / "images"))


def test_it_needs_a_root_and_a_size(root: Path) -> None:
    for root_or_none, side, key in ((None, 16, "root"), (root, None, "image_size")):
        with pytest.raises(ConfigError, match=f"data.{key}: imagefolder needs it"):
            data.load("imagefolder", request(root_or_none, side))


def test_what_is_hidden_is_left_alone(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "train" / ".cache").mkdir()
    (root / "train" / "cat" / ".DS_Store").write_bytes(b"x")
    with caplog.at_level(logging.INFO):
        assert len(data.load("imagefolder", request(root)).train.labels) == 12
    assert "decoding 12 images" in caplog.text
