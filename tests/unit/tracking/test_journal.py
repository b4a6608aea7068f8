"""What holds for a journal wherever it is cut, and for its reader however it grows."""

import json
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.tracking.journal import Journal, Tail, read

# The same examples in every run; a machine that is busy is no failure.
FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=70)
NAMES = ("train/loss", "validation/loss", "test/accuracy")
Told = list[tuple[Any, Any]]


@st.composite
def tales(draw: st.DrawFn) -> Told:
    """What a training tells its journal: (step, values) with steps that only grow, or (kind, text)."""
    metrics = st.tuples(st.integers(0, 3), st.dictionaries(st.sampled_from(NAMES), st.floats(allow_nan=False, allow_infinity=False)))
    events = st.tuples(st.sampled_from(["started", "ended"]), st.text(max_size=8))
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
