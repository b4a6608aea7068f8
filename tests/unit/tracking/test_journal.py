"""What holds for a journal wherever it is cut, and for its reader however it grows."""

import errno
import json
import os
import resource
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import MachineError
from pipeline.tracking.journal import Journal, Tail, last, read

# The same examples in every run; a machine that is busy is no failure.
FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=70)
NAMES = ("train/loss", "validation/loss", "test/accuracy")
Told = list[tuple[Any, Any]]


@st.composite
def tales(draw: st.DrawFn) -> Told:
    """What a training tells its journal: (step, values) with steps that only grow, or (kind, text)."""
    metrics = st.tuples(st.integers(0, 3), st.dictionaries(st.sampled_from(NAMES), st.floats(allow_nan=False, allow_infinity=False)))
    events = st.tuples(st.sampled_from(["note", "remark"]), st.text(max_size=8))
    told: Told = []
    known: dict[tuple[str, int], float] = {}
    step = 0
    for first, second in draw(st.lists(metrics | events, min_size=1, max_size=12)):
        if isinstance(first, int):
            step += first
            told.append((step, {name: known.setdefault((name, step), value) for name, value in second.items()}))
        else:
            told.append((first, second))
    return told


def tell(path: Path, told: Told) -> None:
    journal = Journal(path)
    for first, second in told:
        if isinstance(first, int):
            journal.metrics(second, first)
        else:
            journal.event(first, text=second)
    journal.close()


def points(told: Told) -> dict[tuple[str, int], float]:
    return {(name, step): value for step, values in told if isinstance(step, int) for name, value in values.items()}


def as_told(lines: list[dict[str, Any]]) -> Told:
    return [(line["step"], line["values"]) if line["kind"] == "metrics" else (line["kind"], line["text"]) for line in lines]


@FIXED
@given(tales(), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1, exclude_max=True)), min_size=1, max_size=3))
def test_a_journal_cut_anywhere_and_written_on_keeps_its_whole_lines_and_has_each_metric_once_a_step(
    told: Told, cuts: list[tuple[float, float]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        path = home / "journal.jsonl"
        tell(path, told)
        for cut, resumed in cuts:
            content = path.read_bytes()[: round(cut * path.stat().st_size)]
            path.write_bytes(content)
            whole = [json.loads(line) for line in content.split(b"\n")[:-1]]
            assert list(read(path)) == whole
            held = points(as_told(whole))
            lost = (at for at, one in enumerate(told) if not points([one]).items() <= held.items())
            # A run resumes at or before what its journal has lost.
            again = told[int(resumed * (next(lost, len(told)) + 1)) :]
            tell(path, again)
            lines = list(read(path))
            assert lines[: len(whole)] == whole
            written = [(name, line["step"]) for line in lines if line["kind"] == "metrics" for name in line["values"]]
            assert len(written) == len(set(written))
            assert points(as_told(lines)) == points(told)
            events = [one for one in as_told(lines[len(whole) :]) if isinstance(one[0], str)]
            assert events == [one for one in again if isinstance(one[0], str)]


@FIXED
@given(tales(), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3), st.booleans()), max_size=30))
def test_a_tail_gives_every_line_once_however_the_file_grows_and_the_reader_stops(told: Told, growth: list[tuple[int, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        tell(home / "whole.jsonl", told)
        content = (home / "whole.jsonl").read_bytes()
        path, given_so_far, size = home / "journal.jsonl", [], 0
        tail = Tail(path)
        for more, limit, anew in [*growth, (len(content), len(told), True)]:
            size += more
            path.write_bytes(content[:size])
            given_so_far += islice(tail, limit)
            assert tail.offset == sum(len(line) for line in content.splitlines(keepends=True)[: len(given_so_far)])
            tail = Tail(path, tail.offset) if anew else tail
        assert given_so_far == [json.loads(line) for line in content.splitlines()]


def test_a_journal_is_made_with_its_folders_and_everyone_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one" / "journal.jsonl"
    before = os.umask(0)
    try:
        for _ in range(2):
            Journal(path).close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_line_tells_its_kind_and_when_it_was_written_in_whole_milliseconds(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    before = time.time()
    journal.event("begun", world_size=2)
    after = time.time()
    (line,) = read(tmp_path / "journal.jsonl")
    assert {**line, "at": 0} == {"kind": "begun", "at": 0, "world_size": 2}
    assert isinstance(line["at"], int)
    assert round(before * 1000) <= line["at"] <= round(after * 1000)


def test_a_figure_of_a_step_that_is_known_is_written_neither_twice_nor_again_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for _ in range(2):
        journal = Journal(path)
        journal.event("begun", values={"train/loss": 0}, step=9)
        journal.metrics({"train/loss": 0.5}, 0)
        journal.metrics({"train/loss": 0.4, "validation/loss": 0.6}, 0)
        journal.metrics({"train/loss": 0.3}, 1)
        journal.close()
    figures = [(line["step"], line["values"]) for line in read(path) if line["kind"] == "metrics"]
    assert figures == [(0, {"train/loss": 0.5}), (0, {"validation/loss": 0.6}), (1, {"train/loss": 0.3})]


def test_sync_waits_until_the_file_is_on_the_disk_and_close_lets_go_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def held() -> list[str]:
        return [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]

    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(str(Path(f"/proc/self/fd/{file}").readlink())), fsync(file)))
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    assert synced[-1] == str(tmp_path), "a name that is lost takes the content with it"
    journal.sync()
    assert synced[-1] == str(path)
    assert str(path) in held()
    journal.close()
    assert str(path) not in held()


def test_a_line_that_does_not_fit_leaves_nothing_of_itself_and_names_the_file(tmp_path: Path) -> None:
    """The limit on a file's size stands for the end of a disk: the kernel writes what fits and says how much that was."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.event("begun")
    whole = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, hard))
    try:
        with pytest.raises(OSError, match=r"No space left on device: \d+ bytes are needed, 5 were free") as short:
            journal.event("stopped", step=10)
        left = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole), hard))
        with pytest.raises(OSError, match="File too large") as full:
            journal.event("stopped", step=10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left == path.read_bytes() == whole
    assert (short.value.errno, short.value.filename) == (errno.ENOSPC, str(path))
    assert (full.value.errno, full.value.filename) == (errno.EFBIG, str(path))
    journal.event("stopped", step=10)
    assert [line["kind"] for line in read(path)] == ["begun", "stopped"]


def test_a_line_that_was_cut_is_not_read_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind": "begun"}\n{"kind": "st')
    assert [line["kind"] for line in read(path)] == ["begun"]
    Journal(path).event("gone")
    assert [line["kind"] for line in read(path)] == ["begun", "gone"]


def test_what_a_power_cut_left_as_zeros_is_not_read_and_is_cut_off_with_all_that_lies_behind(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = b'{"kind": "begun"}\n{"kind": "kept"}\n'
    path.write_bytes(whole + b'\0\0\0"}\n{"kind": "stopped"}\n')
    tail = Tail(path)
    assert [line["kind"] for line in tail] == ["begun", "kept"]
    assert tail.offset == len(whole)
    Journal(path).close()
    assert path.read_bytes() == whole
    Journal(path).close()
    assert path.read_bytes() == whole


def test_a_journal_of_one_cut_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind"')
    Journal(path).event("gone")
    assert next(read(path))["kind"] == "gone"


@pytest.mark.parametrize(
    "content", ['{"kind": "a"}\n', '{"kind": "a"}\n{"kind": "bbb"}\n', '{"kind": "another"}\n{"kind": "c"}\n{"kind": "d"}\n']
)
def test_a_journal_that_is_another_one_than_was_read_is_read_from_its_beginning(content: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind": "a"}\n{"kind": "b"}\n')
    tail = Tail(path)
    assert len(list(tail)) == 2
    assert list(tail) == []
    path.write_text(content)
    assert list(tail) == [json.loads(line) for line in content.splitlines()]


def test_a_damaged_line_is_an_error_that_names_the_file_and_the_place(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"kind": "begun"}\n{"kind": \xff}\n')
    with pytest.raises(MachineError, match=f"^{path}: is damaged before byte 30; move {tmp_path} away to train again$"):
        list(read(path))


def test_the_newest_event_of_some_kinds_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert last(path, "begun") == {}
    path.write_text("".join(json.dumps({"kind": kind, "step": step}) + "\n" for step, kind in enumerate("abcab")))
    assert last(path, "a", "c") == {"kind": "a", "step": 3}
    assert last(path, "c") == {"kind": "c", "step": 2}
    assert last(path, "d") == {}


NO_VALUES = '{"kind": "metrics", "at": 1, "step": 2}'
NO_NUMBER = '{"kind": "metrics", "at": 1, "step": 2, "values": {"a": "b"}}'


@pytest.mark.parametrize("line", ["[]", "5", "{}", '{"kind": []}', NO_VALUES, NO_NUMBER])
def test_a_line_without_what_its_kind_has_is_damaged(line: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(MachineError, match=f"^{path}: is damaged before byte {len(line) + 1}; "):
        list(read(path))
