"""One image: what its pixels become, and what is no fault of it."""

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline import data, prepare
from pipeline.config import Config, ConfigError, MachineError
from pipeline.data import Raw, Split, decode, decoding, image_files
from pipeline.files import Paths
from tests.kit.experiment import settings
from tests.unit.data.test_imagefolder import fill, picture, request


def decoded(path: Path, side: int = 20) -> np.ndarray:
    (found,) = decoding._all([path], side)
    assert not isinstance(found, str), found
    return found


def test_formats_and_modes_give_the_pixels_that_they_show(tmp_path: Path) -> None:
    shown = picture(3, 20, 20)
    grey = shown.convert("L")
    folder = tmp_path / "images" / "train" / "cat"
    fill(tmp_path / "images" / "train", 1)
    fill(tmp_path / "images" / "test", 1)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    half = shown.copy()
    half.putalpha(Image.fromarray(np.where(np.mgrid[0:20, 0:20][1] < 10, 255, 0).astype(np.uint8)))
    turned = shown.transpose(Image.Transpose.ROTATE_90)
    orientation = Image.Exif()
    orientation[0x0112] = 6
    saved = {
        "1.png": (shown, {}),
        "2.webp": (shown, {"lossless": True}),
        "3.bmp": (shown, {}),
        "4-grey.png": (grey, {}),
        "5-deep.png": (deep, {}),
        "6-palette.png": (shown.quantize(256), {}),
        "7-alpha.png": (half, {}),
        "8-turned.png": (turned, {"exif": orientation}),
        "9.JPEG": (shown.convert("CMYK"), {"quality": 95, "format": "JPEG"}),
    }
    for name, (image, options) in saved.items():
        image.save(folder / name, **options)
    raw = data.load("imagefolder", request(tmp_path / "images", 20))
    found = dict(zip(["000.jpg", *saved], raw.train.images[raw.train.labels == 1], strict=True))
    expected, in_grey = (np.asarray(one.convert("RGB")).transpose(2, 0, 1).astype(int) for one in (shown, grey))
    for name in ("1.png", "2.webp", "3.bmp", "8-turned.png"):
        assert np.array_equal(found[name], expected), name
    for name in ("4-grey.png", "5-deep.png"):
        assert np.array_equal(found[name], in_grey), name
    assert np.abs(found["6-palette.png"] - expected).mean() < 12
    assert np.abs(found["9.JPEG"] - expected).mean() < 6
    assert np.array_equal(found["7-alpha.png"][:, :, :10], expected[:, :, :10])
    assert np.all(found["7-alpha.png"][:, :, 10:] == 255)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_cameras_orientation_is_applied_as_pil_applies_it(orientation: int, tmp_path: Path) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(1, 30, 20).save(tmp_path / "one.png", exif=exif)
    with Image.open(tmp_path / "one.png") as file:
        upright = ImageOps.exif_transpose(file).convert("RGB")
    by_pil = np.asarray(ImageOps.fit(upright, (20, 20), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.array_equal(decoded(tmp_path / "one.png"), by_pil)


@pytest.mark.parametrize("exif", [b"Exif\0\0II*\0", b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x02up\0\0"])
def test_notes_of_a_camera_that_cannot_be_read_leave_the_image_as_it_lies(
    exif: bytes, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    picture(1, 20, 20).save(tmp_path / "plain.jpg", quality=95)
    picture(1, 20, 20).save(tmp_path / "noted.jpg", quality=95, exif=exif)
    assert np.array_equal(decoded(tmp_path / "noted.jpg"), decoded(tmp_path / "plain.jpg"))
    assert not recwarn


def test_of_16_bits_the_upper_8_are_taken_however_dark_an_image_is(tmp_path: Path) -> None:
    for value in (200, 300, 65535):
        Image.fromarray(np.full((20, 20), value, np.uint16)).save(tmp_path / f"{value}.png")
        assert np.all(decoded(tmp_path / f"{value}.png") == value >> 8)


@pytest.mark.parametrize(("number", "said"), [(errno.EIO, None), (errno.EACCES, None), (errno.ENOENT, "cannot be decoded")])
def test_what_the_disk_does_is_no_fault_of_an_image(number: int, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(number, "as the disk says")

    monkeypatch.setattr(Image, "open", failing)
    if said is None:
        with pytest.raises(OSError, match="as the disk says"):
            decode.decode(tmp_path / "one.jpg", 20, "one.jpg")
    else:
        assert said in str(decode.decode(tmp_path / "one.jpg", 20, "one.jpg"))


def killed(paths: list[Path], side: int) -> Any:
    import os

    os.kill(os.getpid(), 9)


def test_a_decoder_that_is_killed_is_said_to_lack_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_unless_stopped", killed)
    monkeypatch.setattr(decoding, "CHUNK", 1)
    fill(tmp_path / "images", 2)
    with pytest.raises(MachineError, match=r"memory is too short: each core decodes an image at once; free some"):
        data.load("imagefolder", request(tmp_path / "images"))


def test_a_number_behind_the_name_is_refused() -> None:
    wanted = data.Request(Path("photos"), Path("nowhere"), 1, "500", "", 16)
    with pytest.raises(ConfigError, match="imagefolder:500: the first images would be of one class"):
        data.load("imagefolder:500", wanted)


def test_what_is_no_square_of_that_size_is_resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(height: int, width: int, count: int) -> Split:
        return Split(np.zeros((count, 1, height, width), np.uint8), np.arange(count) % 2)

    for train, test in (((32, 28), (32, 28)), ((28, 28), (32, 32))):
        raw = Raw(of(*train, 40), of(*test, 10), ["a", "b"])
        monkeypatch.setattr("pipeline.data.synthetic.load", lambda _, raw=raw: raw)
        assert (
            prepare.run(Config.model_validate(settings(data={"name": "synthetic:40", "image_size": 28})), Paths(tmp_path / "params.yaml"))
            == 0
        )


@pytest.mark.parametrize(("name", "said"), [("a\nb", "a\\nb"), ("caf\udce9", "caf\\xe9"), ("Ente", "Ente"), ("猫", "猫")])
def test_a_name_is_shown_in_one_line(name: str, said: str) -> None:
    assert image_files.shown(name) == said


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "images", 2)
    scandir: Callable[..., Any] = image_files.os.scandir

    def refusing(folder: Any = ".") -> Any:
        if re.search("cat$", str(folder)):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(image_files.os, "scandir", refusing)
    with pytest.raises(PermissionError):
        data.load("imagefolder", request(tmp_path / "images"))
