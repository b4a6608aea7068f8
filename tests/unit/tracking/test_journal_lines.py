"""What a line of a journal has at least, and what is damaged because it lacks that."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import MachineError
from pipeline.tracking.journal import CHECKPOINT, CHECKPOINTS, metrics_by_step, read
from pipeline.tracking.receipt import elapsed_seconds

WHOLE: list[dict[str, Any]] = [
    {"kind": "run", "at": 1, "id": "a", "experiment": "b", "name": "c", "params": {}, "tags": {}},
    {"kind": "started", "stage": "train", "tags": {}},
    {"kind": "metrics", "at": 1, "step": 2, "values": {"train/loss": 0.5, "train/samples": 7}},
    {"kind": "checkpoint", "step": 2},
    {"kind": "note", "text": "a"},
    {"kind": "stopped", "step": 2},
    {"kind": "finished", "step": 2, "weights_sha256": "a"},
    {"kind": "attempt-ended", "elapsed_seconds": 0.5},
    {"kind": "attempt-ended", "elapsed_seconds": 1},
    {"kind": "tags", "tags": {}},
    {"kind": "artifact", "path": "a"},
    {"kind": "model", "path": "a", "shape": [1]},
    {"kind": "ended", "at": 1, "stage": "train", "outcome": "done"},
]
FIELDS = [(line, name) for line in WHOLE for name in line]


def lines(tmp_path: Path, *values: Any) -> list[dict[str, Any]]:
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return list(read(path))


def test_whole_lines_are_read_with_all_that_they_have(tmp_path: Path) -> None:
    more = [line | {"more": None} for line in WHOLE]
    assert lines(tmp_path, *WHOLE, *more, {"kind": "of a later version"}) == [*WHOLE, *more, {"kind": "of a later version"}]


@pytest.mark.parametrize(("line", "name"), FIELDS, ids=[f"{line['kind']}-{name}" for line, name in FIELDS])
def test_a_line_without_one_of_its_fields_or_with_another_type_is_damaged(line: dict[str, Any], name: str, tmp_path: Path) -> None:
    without = {key: value for key, value in line.items() if key != name}
    # A list where none is expected, and none where one is.
    other = {} if isinstance(line[name], list) else []
    for damaged in (without, line | {name: other}):
        with pytest.raises(MachineError, match="is damaged before byte"):
            lines(tmp_path, damaged)


@pytest.mark.parametrize(
    "line", [[], 5, None, {"kind": "metrics", "at": 1, "step": 2, "values": {"a": "b"}}, {"kind": "later", "values": 5}]
)
def test_what_is_no_line_at_all_is_damaged(line: Any, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="is damaged before byte"):
        lines(tmp_path, line)


@pytest.mark.parametrize("content", [b"{}", b"{", b"\xff", b"[" * 100_000], ids=["no kind", "no JSON", "no text", "too deep"])
def test_bytes_that_are_no_line_are_damaged(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content + b"\n")
    with pytest.raises(MachineError, match="is damaged before byte"):
        list(read(path))


def test_metrics_are_found_by_step_in_the_order_of_steps(tmp_path: Path) -> None:
    def metrics(step: int, **values: float) -> dict[str, Any]:
        return {"kind": "metrics", "at": 1, "step": step, "values": values}

    told = [metrics(4, loss=0.25), {"kind": "stopped", "step": 9}, metrics(2, loss=0.5), metrics(4, accuracy=1)]
    lines(tmp_path, *told)
    found = metrics_by_step(tmp_path / "journal.jsonl")
    assert list(found.items()) == [(2, {"loss": 0.5}), (4, {"loss": 0.25, "accuracy": 1})]


def test_the_names_that_every_run_has_on_its_disk_stay() -> None:
    assert (CHECKPOINT, CHECKPOINTS) == ("checkpoint", "checkpoints")


def test_the_hours_of_a_start_that_was_killed_count_up_to_its_last_line(tmp_path: Path) -> None:
    killed = [("started", 1_000), ("metrics", 5_000), ("checkpoint", 9_500)]
    stopped = [("started", 100_000), ("checkpoint", 102_000), ("attempt-ended", 103_000), ("ended", 104_000)]
    whole = {line["kind"]: line for line in reversed(WHOLE)}
    for events, seconds in ((killed, 8.5), (stopped, 0.5), (killed + stopped, 9.0), (stopped + killed, 9.0), (killed + killed, 17.0)):
        lines(tmp_path, *(whole[kind] | {"at": at} for kind, at in events))
        assert elapsed_seconds(tmp_path / "journal.jsonl") == seconds
