"""Every file that a user can touch, damaged in every way: a code of the table, one line that names a file, nothing of worth overwritten."""

import contextlib
import io
import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import __main__ as commands
from pipeline.config import MachineError
from pipeline.tracking.journal import read
from tests.kit.finished import Pretended, finish, pretend

FILES = (
    "params.yaml",
    "models",
    "models/receipt.json",
    "models/model.safetensors",
    "data/prepared",
    "data/prepared/manifest.json",
    "data/prepared/train-images.npy",
    "data/prepared/validation-labels.npy",
    "data/prepared/test-images.npy",
    "metrics",
    "metrics/train.json",
    "plots",
    "runs",
    "runs/RUN/identity.json",
    "runs/RUN/status.json",
    "runs/RUN/mirror.json",
    "runs/RUN/journal.jsonl",
    "runs/RUN/receipt.json",
    "runs/RUN/model.safetensors",
    "runs/RUN/lock",
    "runs/RUN/writing.lock",
    "runs/RUN/logs",
    "runs/RUN/plots",
    "runs/RUN/checkpoints",
    "runs/RUN/checkpoints/index.json",
    "runs/RUN/checkpoints/step-00000003.safetensors",
)
CONTENTS = {
    "empty": b"",
    "an object": b"{}",
    "a list": b"[]",
    "null": b"null",
    "a number": b"5\n",
    "text": b'"text"\n',
    "binary": bytes(range(256)) * 8,
    "zeros": b"\0" * 4096,
    "deep": b"[" * 100_000,
    "a huge number": b'{"step": 1e999, "pid": 99999999999999999999999, "offset": -1}\n',
    "a line of another kind": b'{"kind": "metrics", "at": 1}\n',
    "not even that": b'[{"kind": "run"}]\n{"kind": ["run"], "at": 1}\n',
}
VALUES: tuple[Any, ...] = (None, [], {}, "", "../../elsewhere", -1, 1.5, True, [[]], {"a": 1})
ALIKE = ("source", "versions")
# What a training has cost: none of it may be written over because something else is damaged.
PRECIOUS = ("journal.jsonl", "receipt.json", "model.safetensors", "model.pt2", "checkpoints", "identity.json")


class Place:
    """A finished experiment that can be put back, and another one's files."""

    def __init__(self, folder: Path, done: bool):
        self.folder, self.pristine, self.other = folder / "here", folder / "pristine", folder / "other"
        self.run = finish(self.folder, done)
        self.other_run = finish(self.other, seed=2, data__name="synthetic:220")
        shutil.copytree(self.folder, self.pristine)

    def path(self, name: str, root: Path | None = None, run: Path | None = None) -> Path:
        return (root or self.folder) / name.replace("RUN", (run or self.run).name)

    def put_back(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.pristine, self.folder, symlinks=True)

    def precious(self, damaged: str) -> dict[str, bytes]:
        """The content of all that is worth something, but for what was damaged."""
        found = {}
        for name in PRECIOUS:
            path = self.run / name
            for one in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if self.path(damaged) not in (one, *one.parents) and one.is_file():
                    found[one.relative_to(self.run).as_posix()] = one.read_bytes()
        return found

    def write(self, path: Path, content: bytes) -> None:
        remove(path)
        path.write_bytes(content)

    def damages(self, name: str) -> Iterator[str]:
        """Damage a file in one way after the other, and put everything back before each."""
        path = self.path(name)
        original = path.read_bytes() if path.is_file() else b""
        for how, content in CONTENTS.items():
            self.put_back()
            self.write(path, content)
            yield how
        for share in (0.1, 0.5, 0.99):
            self.put_back()
            self.write(path, original[: int(share * len(original))])
            yield f"cut to {share}"
        for how in ("gone", "a folder", "a link to nothing", "a link to itself", "another's"):
            self.put_back()
            remove(path)
            if how == "a folder":
                (path / "inside").mkdir(parents=True)
            elif how.startswith("a link"):
                path.symlink_to(path.name if how == "a link to itself" else "nowhere")
            elif how == "another's":
                other = self.path(name, self.other, self.other_run)
                shutil.copytree(other, path) if other.is_dir() else shutil.copy(other, path)
            yield how

    def other_values(self, name: str) -> Iterator[str]:
        """The same with one value after the other of a JSON file."""
        path = self.path(name)
        for how, content in changed(path.read_bytes()):
            self.put_back()
            self.write(path, content)
            yield how


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def changed(original: bytes) -> Iterator[tuple[str, bytes]]:
    """A JSON object, or a journal's lines, with every value of two levels gone or replaced: by three of VALUES if its like was before."""
    turn, seen = itertools.cycle(VALUES), set[object]()
    try:
        lines = [json.loads(original)] if original.startswith(b"{\n") else [json.loads(line) for line in original.splitlines()]
    except ValueError:
        return
    for number, line in enumerate(lines):
        if not isinstance(line, dict):
            return
        inside = [(key, one) for key, value in line.items() if isinstance(value, dict) for one in value]
        for key, inner in [*((key, None) for key in line), *inside]:
            # The same key in another line of this kind, or the neighbours in a table of versions or digests.
            like = (line.get("kind"), key, None if inner is None or key in ALIKE else inner, inner is None)
            for value in (..., *(itertools.islice(turn, 3) if like in seen else VALUES)):
                copy = json.loads(json.dumps(line))
                place, last = (copy, key) if inner is None else (copy[key], inner)
                place[last] = value
                if value is ...:
                    del place[last]
                whole = [*lines[:number], copy, *lines[number + 1 :]]
                yield f"line {number}, {key}/{inner}: {value!r}", b"".join(json.dumps(one).encode() + b"\n" for one in whole)
            seen.add(like)


@pytest.fixture(scope="module", params=[True, False], ids=["finished", "stopped"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path_factory.getbasetemp()
    folder = memory / f"damaged-{os.getpid()}"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("MLFLOW_", "DVC_", "LOCKSTEP_"))]:
            patch.delenv(name)
        pretend(patch)
        try:
            yield Place(folder, request.param)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def run(place: Place, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """The command's exit code, and what it printed."""
    printed = io.StringIO()
    handler, log = logging.StreamHandler(printed), logging.getLogger("pipeline")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    monkeypatch.setattr("sys.argv", ["pipeline", words[0], "--params", str(place.folder / "params.yaml"), *words[1:]])
    try:
        with contextlib.redirect_stderr(printed):
            return commands.main(), printed.getvalue()
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


def judge(name: str, how: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = place.precious(name)
    for words in (["evaluate"], ["train"], ["sync"], ["train", "--resume", str(place.run)], ["prepare"]):
        case = f"{' '.join(words[:2])}: {name}: {how}"
        started = Pretended.started
        code, printed = run(place, monkeypatch, *words)
        lines = printed.splitlines() or [""]
        assert code in (0, 2, 3, 4), f"{case}: {code}\n{printed}"
        if code:
            assert "Traceback" not in printed, case
            assert str(place.folder) in lines[-1] or "--resume" in lines[-1], f"{case}:\n{printed}"
            assert len(lines[-1]) < 1000, case
            assert Pretended.started == started, f"{case}: ranks were started"
        after = place.precious(name)
        # A journal may have grown.
        lost = [one for one, content in before.items() if not after.get(one, b"").startswith(content)]
        assert not lost, f"{case}: {lost} changed\n{printed}"


@pytest.mark.fault(
    33, "26 files of a finished and of a stopped run: empty, cut, of another type, a folder, a link, another run's; five commands each"
)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_in_one_line_and_nothing_else_is_lost(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(judge(name, how, place, monkeypatch) is None for how in place.damages(name)) == len(CONTENTS) + 8


@pytest.mark.slow
@pytest.mark.fault(33, "every value of every JSON file, gone and of other types; five commands each")
@pytest.mark.parametrize("name", [name for name in FILES if name.endswith((".json", ".jsonl", "lock"))])
def test_a_value_of_another_type_is_no_different(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.path(name, place.pristine).exists() and place.path(name, place.pristine).stat().st_size:
        assert sum(judge(name, how, place, monkeypatch) is None for how in place.other_values(name)) > 10


def test_an_undamaged_experiment_is_recognised_by_every_command(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put_back()
    started, done = Pretended.started, (place.run / "receipt.json").exists()
    assert run(place, monkeypatch, "train")[0] == 0
    assert Pretended.started == started + (not done)
    code, printed = run(place, monkeypatch, "evaluate")
    assert (code, Pretended.started) == (0, started + 1 + (not done)), printed
    assert run(place, monkeypatch, "sync")[0] == 0


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "5",
        "{}",
        '{"kind": []}',
        '{"kind": "metrics", "at": 1, "step": 2}',
        '{"kind": "metrics", "at": 1, "step": 2, "values": {"a": "b"}}',
    ],
)
def test_a_line_without_what_its_kind_has_is_damaged(line: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(MachineError, match=f"^{path}: is damaged before byte {len(line) + 1}; "):
        list(read(path))
