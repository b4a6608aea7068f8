"""Images are decoded into files: once, whatever happens to the process, with the same bytes on any number of cores."""

import io
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from pipeline import data, prepare
from pipeline.config import Config
from pipeline.data import Split, decoding, picked, store
from pipeline.files import Paths
from tests.kit.experiment import ROOT, Experiment, clean_environment, settings
from tests.kit.waiting import until
from tests.unit.data.test_imagefolder import fill, picture, request


def scratch(folder: Path) -> Path:
    (found,) = folder.glob(".decoding-*")
    return found


@pytest.mark.parametrize("left", [0.0, 0.5, 3.0, 5.7, 12.0])
def test_what_was_decoded_is_not_decoded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, left: float) -> None:
    fill(tmp_path / "images" / "train", 6)
    fill(tmp_path / "images" / "test", 2, 50)
    whole = data.load("imagefolder", request(tmp_path / "images"))
    file, size = scratch(tmp_path) / "train", 3 * 16 * 16
    expected = np.array(whole.train.images)
    os.truncate(file, int(left * size))
    # To see whether it is taken as it is.
    if left >= 1:
        with file.open("r+b") as first:
            first.write(bytes([7] * size))
        expected[0] = 7
    with caplog.at_level(logging.INFO):
        again = data.load("imagefolder", request(tmp_path / "images"))
    assert np.array_equal(again.train.images, expected)
    assert np.array_equal(again.test.images, whole.test.images)
    assert (f"decoding 12 images, {int(left)} of them are there already" in caplog.text) == (left >= 1)
    again.packed()
    assert not [*tmp_path.glob(".decoding-*")]


def test_another_file_size_side_or_boot_begins_anew_and_removes_what_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "images", 4)
    seen: set[Path] = set()

    def load(side: int = 16) -> None:
        data.load("imagefolder", request(tmp_path / "images", side))
        assert scratch(tmp_path) not in seen
        seen.add(scratch(tmp_path))

    load()
    load(20)
    picture(99).save(tmp_path / "images" / "cat" / "000.jpg")
    load(20)
    os.utime(tmp_path / "images" / "cat" / "001.jpg", (1, 1))
    load(20)
    monkeypatch.setattr(decoding, "boot_id", lambda: "another")
    load(20)


def test_progress_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "images", 4)
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(decoding.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO):
        data.load("imagefolder", request(tmp_path / "images"))
    assert [one for one in caplog.messages if "decoded" in one] == [f"decoded {count} of 8 images" for count in (2, 4, 6, 8)]


@pytest.mark.parametrize("count", [1, 999, 1000, 2500])
def test_arrays_are_written_in_pieces_as_numpy_would_write_them_whole(tmp_path: Path, count: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (count, 1, 4, 4), np.uint8)
    labels = np.arange(count) % 2
    if count < 2:
        labels[:] = 0
    chosen = np.arange(count)[::-1].copy()
    names = ["a", "b"][: 1 + (count > 1)]
    splits = dict.fromkeys(("train", "validation", "test"), picked(Split(images, labels), chosen))
    manifest = store.write(tmp_path / "prepared", {"data.name": "made"}, splits, names)
    for kind, array in (("images", images), ("labels", labels)):
        whole = io.BytesIO()
        np.save(whole, array[chosen])
        assert (tmp_path / "prepared" / f"train-{kind}.npy").read_bytes() == whole.getvalue()
    assert manifest.mean == [pytest.approx(images.mean() / 255)]


@pytest.mark.slow
@pytest.mark.fault(12, "prepare is killed while it decodes, three times")
def test_prepare_that_is_killed_goes_on_and_ends_in_the_same_bytes(tmp_path: Path) -> None:
    fill(tmp_path / "images", 800)
    digests: list[str] = []
    for name in ("whole", "parts"):
        folder = tmp_path / name
        folder.mkdir()
        one = Experiment(folder).set(data={"name": "imagefolder", "root": str(tmp_path / "images"), "image_size": 32})
        for count in (200, 600, 1000) if name == "parts" else ():
            words = [sys.executable, "-m", "pipeline", "prepare", "--params", str(one.params)]
            process = subprocess.Popen(words, cwd=ROOT, env=clean_environment(), stderr=subprocess.DEVNULL)
            until(lambda count=count, folder=folder: decoded(folder / "data") >= count * 3 * 32 * 32, process, every_seconds=0.001)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert not (folder / "data" / "prepared").exists()
            # Whoever decodes ends with it.
            assert not psutil.wait_procs(children, timeout=10)[1]
        started_at = time.monotonic()
        said = one.run("prepare")
        assert ("are there already" in said) == (name == "parts"), said
        digests.append(store.read_manifest(folder / "data" / "prepared").digest)
        print(name, time.monotonic() - started_at)
    assert digests[0] == digests[1]


def test_ctrl_c_waits_for_no_large_image_and_says_what_is_kept(tmp_path: Path) -> None:
    fill(tmp_path / "images", 40)
    for path in (tmp_path / "images" / "cat").iterdir():
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (2500, 2500, 3), np.uint8)).save(path)
    one = Experiment(tmp_path).set(data={"name": "imagefolder", "root": "images", "image_size": 32})
    process = one.start("prepare")
    until(lambda: decoded(tmp_path / "data") >= 8 * 3 * 32 * 32, process)
    process.send_signal(signal.SIGINT)
    signalled_at = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    # What is under way takes some times as long.
    assert time.monotonic() - signalled_at < 2
    kept = re.search(r"(\d+) of 80 images are decoded, and need not be again\nstopped; nothing half-written is left", said)
    assert kept
    assert decoded(tmp_path / "data") == int(kept[1]) * 3 * 32 * 32
    assert "Traceback" not in said


def decoded(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(".decoding-*/all"))


def test_a_data_set_is_prepared_by_one_process_at_a_time(tmp_path: Path) -> None:
    from threading import Thread

    from pipeline.files import locked

    (tmp_path / "data").mkdir()
    config = Config.model_validate(settings())
    thread = Thread(target=prepare.run, args=(config, Paths(tmp_path / "params.yaml")))
    with locked(tmp_path / "data"):
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert not (tmp_path / "data" / "prepared").exists()
    thread.join(60)
    assert (tmp_path / "data" / "prepared").exists()
