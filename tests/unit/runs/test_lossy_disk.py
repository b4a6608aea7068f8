"""A power cut in the middle of a training, on a disk that keeps only what was synced: from every state it goes on to the same end."""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import Config, DataError
from pipeline.data import Split, store
from pipeline.files import atomic_write, write_checksummed_json
from pipeline.job import Job
from pipeline.runs.resume import import_run
from pipeline.training import checkpoint
from tests.kit.experiment import settings
from tests.kit.lossy_disk import CrashState
from tests.kit.lossy_recording import Recording, only_files, only_folders
from tests.kit.lossy_training import Watch, train

# In memory: nothing here rests on the disk below.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
RUN = Path("runs", "one")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


class Noting(Watch):
    """Notes in a recording which save has returned."""

    def __init__(self, recording: Recording):
        self._recording = recording

    def saved(self, step: int) -> None:
        self._recording.note(step)


def figures(run: Path) -> list[Any]:
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_bytes().splitlines()]
    return [
        (line["step"], name, value)
        for line in lines
        if line["kind"] == "metrics"
        for name, value in line["values"].items()
        if "per_second" not in name and not name.startswith("system/")
    ]


def best(run: Path) -> tuple[int, float]:
    found = json.loads((run / "checkpoints" / "index.json").read_bytes())["best"]
    return found["step"], found["accuracy"]


class Unhurt:
    """The same training left alone: what every other must end like."""

    def __init__(self, run: Path, keep: int, watch: Watch | None = None):
        self.keep = keep
        self.states = train(run, keep, watch=watch).states
        self.figures, self.best = figures(run), best(run)

    def fault(self, run: Path, saved: int) -> str | None:
        """What is wrong with going on in this folder, when the save of step `saved` had returned, or None."""
        try:
            found = train(run, self.keep)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if found.restored < saved:
            return f"went on from step {found.restored}, though the save of step {saved} had returned"
        if found.restored and any(self.states.get(step, digest) != digest for step, digest in found.states.items()):
            return "other weights"
        if figures(run) != self.figures:
            return "figures are missing or there twice"
        if [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]:
            return "half a file is left"
        return None if best(run) == self.best else "another best model"


def faults(states: list[CrashState], look: Callable[[Path, int], str | None]) -> Iterator[str]:
    """What a look at each crash state finds wrong."""
    for state in states:
        with tempfile.TemporaryDirectory(dir=MEMORY) as name:
            state.write_to(Path(name))
            found = look(Path(name), state.note)
            if found:
                files = [f"{path} ({'folder' if content is None else len(content)})" for path, content in sorted(state.tree, key=str)]
                yield f"{found}: {', '.join(files)}"


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.fault(32, "all that a training writes, with every loss and tear of what was not synced, at every write")
def test_a_training_goes_on_from_every_state_that_a_power_cut_can_leave(keep: int, folder: Path, record_property: Any) -> None:
    with Recording(folder) as recording:
        unhurt = Unhurt(folder / RUN, keep, Noting(recording))
    states = recording.crash_states()
    assert len(states) > 500
    assert list(faults(states, lambda root, saved: unhurt.fault(root / RUN, saved))) == []
    record_property("happened", f"{len(states)} crash states: none older than the last save, each ends with the same weights and figures")


def index_before_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake of naming a checkpoint before it is there."""
    held: list[tuple[Path, bytes]] = []

    def hold(path: Path, content: Any) -> None:
        written = io.BytesIO()
        content.write_to(written)
        held.append((path, written.getvalue()))

    def write_index(path: Path, values: dict[str, Any]) -> None:
        write_checksummed_json(path, values)
        atomic_write(*held.pop())

    monkeypatch.setattr(checkpoint, "atomic_write", hold)
    monkeypatch.setattr(checkpoint, "write_checksummed_json", write_index)


@pytest.mark.parametrize(
    ("mistake", "disk", "symptom"),
    [
        (None, {"honours": only_folders}, "JSONDecodeError|no good checkpoint is left|went on from step"),
        (None, {"honours": only_files}, "no good checkpoint is left|went on from step"),
        (index_before_file, {}, "no good checkpoint is left"),
    ],
    ids=["files are not synced", "folders are not synced", "the index is written before the file"],
)
def test_a_training_that_does_not_sync_or_not_in_order_is_found_out(
    mistake: Any, disk: dict[str, Any], symptom: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    unhurt = Unhurt(folder / "unhurt", 1)
    root = folder / "root"
    root.mkdir()
    with monkeypatch.context() as patched, Recording(root, **disk) as recording:
        if mistake:
            mistake(patched)
        # One save is enough for it.
        train(root / RUN, 1, steps=2, watch=Noting(recording))
    found = next(faults(recording.crash_states()[::-1], lambda root, saved: unhurt.fault(root / RUN, saved)), "")
    assert any(word in found for word in symptom.split("|")), found


def test_a_second_start_survives_a_power_cut_too(folder: Path) -> None:
    """It begins with a torn journal, a checkpoint too many and half a file, which it clears away while it goes on."""
    unhurt = Unhurt(folder / "unhurt", 2)
    root = folder / "root"
    run = root / RUN
    train(run, 2, steps=4)
    with (run / "journal.jsonl").open("ab") as file:
        file.write(b'{"kind": "metr' + bytes(100) + b'}\n{"kind": "note"}\n')
    (run / "checkpoints" / ".step-00000006.safetensors.partial").write_bytes(b"half")
    shutil.copy(run / "checkpoints" / "step-00000004.safetensors", run / "checkpoints" / "step-00000005.safetensors")
    recording = Recording(root)
    recording.settle()
    recording.note(4)
    with recording:
        train(run, 2, watch=Noting(recording))
    states = recording.crash_states()
    assert len(states) > 100
    assert list(faults(states, lambda root, saved: unhurt.fault(root / RUN, saved))) == []


IMPORTED = "the import had returned"


def test_an_import_is_there_whole_or_is_made_again(folder: Path) -> None:
    unhurt = Unhurt(folder / "unhurt", 2)
    train(folder / "source", 2, steps=4)

    def job(root: Path) -> Job:
        values = {"device": "cpu", "backend": "gloo", "precision": "fp32", "prepared": root, "run": root / RUN}
        return Job.model_validate({"config": Config.model_validate(settings())} | values)

    def resume(root: Path) -> None:
        import_run(folder / "source", job(root), {"seed": 1}, {"experiment": "lossy", "name": "lossy", "params": {}, "tags": {}})

    root = folder / "root"
    root.mkdir()
    with Recording(root) as recording:
        resume(root)
        recording.note(4)
    states = recording.crash_states()
    assert len(states) > 10

    def look(root: Path, saved: int) -> str | None:
        if saved < 0:
            try:
                # Without --resume it begins anew, or says in a line why it does not.
                copy = root / "copy"
                shutil.copytree(root, copy)
                begun = unhurt.fault(copy / RUN, -1)
                if begun and not begun.startswith("MachineError"):
                    return begun
                resume(root)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return unhurt.fault(root / RUN, 4)

    assert list(faults(states, look)) == []


def test_prepared_data_are_there_whole_or_refused(folder: Path) -> None:
    """And nothing is half trusted: what can be read is what was written."""
    images = np.arange(6 * 4, dtype=np.uint8).reshape(6, 1, 2, 2)
    split = Split(images, np.array([0, 1, 0, 1, 0, 1]))
    root = folder / "root"
    root.mkdir()
    with Recording(root) as recording:
        for seed in (1, 2):
            names = {"data.name": "tiny", "seed": seed}
            store.write(root / "data" / "prepared", names, {"train": split, "validation": split, "test": split}, ["a", "b"])
            recording.note(seed)
    states = recording.crash_states()

    def look(root: Path, seed: int) -> str | None:
        try:
            manifest = store.read_manifest(root / "data" / "prepared")
            store.verify(root / "data" / "prepared", manifest, ("train", "validation", "test"))
        except DataError as error:
            # The old is removed before the new takes its place: what made it makes it again.
            return str(error) if seed == 2 else None
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        found = store.open_split(root / "data" / "prepared", "train")
        if not (found.images == images).all() or int(manifest.made_for["seed"] or 0) < seed:
            return "other data"
        return None

    assert list(faults(states, look)) == []
