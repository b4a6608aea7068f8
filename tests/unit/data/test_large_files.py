"""Large prepared files are read whole once, and then known again as long as nobody has touched them."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import DataError
from pipeline.data import store
from tests.kit.experiment import make_job

ALL = ("train", "validation", "test")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepared data, all of it large, and written a while ago."""
    monkeypatch.setattr(store, "SMALL_BYTES", 0)
    monkeypatch.setattr(store, "SETTLED_SECONDS", -1.0)
    return make_job(tmp_path).prepared


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read whole."""
    found: list[str] = []
    sha256 = store.sha256

    def counted(path: Path) -> str:
        found.append(path.name)
        return sha256(path)

    monkeypatch.setattr(store, "sha256", counted)
    return found


def test_what_was_read_is_not_read_again_unless_that_is_asked_for(folder: Path, read: list[str]) -> None:
    manifest = store.read_manifest(folder)
    store.verify(folder, manifest, ("train",))
    assert read == ["train-images.npy", "train-labels.npy"]
    store.verify(folder, manifest, ALL)
    assert sorted(read) == sorted(manifest.sha256)
    store.verify(folder, manifest, ALL)
    assert len(read) == 6
    store.verify(folder, manifest, ALL, again=True)
    assert len(read) == 12


def rewritten(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def with_its_old_time(path: Path) -> None:
    before = path.stat()
    rewritten(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    rewritten(other)
    before = path.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.fault(12, "a large prepared file changed after it was read")
@pytest.mark.parametrize("change", [rewritten, with_its_old_time, replaced])
def test_a_file_that_is_another_one_is_read_and_refused(folder: Path, change: Callable[[Path], None]) -> None:
    manifest = store.read_manifest(folder)
    store.verify(folder, manifest, ALL)
    # The kernel's clock ticks in milliseconds.
    time.sleep(0.02)
    change(folder / "train-images.npy")
    with pytest.raises(DataError, match=r"train-images\.npy: expected SHA-256"):
        store.verify(folder, manifest, ALL)
    (folder / "train-images.npy").unlink()
    with pytest.raises(DataError, match="found nothing"):
        store.verify(folder, manifest, ALL)


def test_another_manifests_digest_is_not_taken_for_the_files(folder: Path) -> None:
    manifest = store.read_manifest(folder)
    store.verify(folder, manifest, ALL)
    other = manifest.model_copy(update={"sha256": manifest.sha256 | {"train-images.npy": "0" * 64}})
    with pytest.raises(DataError, match=f"expected SHA-256 {'0' * 64}"):
        store.verify(folder, other, ALL)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"train-images.npy": 3}'])
def test_a_damaged_record_is_as_good_as_none(folder: Path, read: list[str], content: str) -> None:
    (folder.parent / ".prepared.seen.json").write_text(content)
    store.verify(folder, store.read_manifest(folder), ("train",))
    assert len(read) == 2
    assert set(json.loads((folder.parent / ".prepared.seen.json").read_text())) >= {"train-images.npy", "train-labels.npy"}


def test_small_files_and_those_just_written_are_read_at_every_start(folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = store.read_manifest(folder)
    monkeypatch.setattr(store, "SETTLED_SECONDS", 3600.0)
    store.verify(folder, manifest, ALL)
    monkeypatch.setattr(store, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(store, "SMALL_BYTES", 2**30)
    store.verify(folder, manifest, ALL)
    assert len(read) == 12
    assert not (folder.parent / ".prepared.seen.json").exists()


def test_what_is_written_behind_the_reader_is_not_taken_as_read(folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, path = store.read_manifest(folder), folder / "train-images.npy"
    sha256 = store.sha256

    def written_behind(one: Path) -> str:
        found = sha256(one)
        if one == path:
            rewritten(path)
        return found

    monkeypatch.setattr(store, "sha256", written_behind)
    store.verify(folder, manifest, ("train",))
    monkeypatch.setattr(store, "sha256", sha256)
    with pytest.raises(DataError, match=r"train-images\.npy: expected SHA-256"):
        store.verify(folder, manifest, ("train",))
