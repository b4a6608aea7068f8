"""The index of checkpoints: what it lists, what of that is intact, and which one a resume takes."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import MachineError
from pipeline.files import write_checksummed_json
from pipeline.runs.checkpoints import INDEX, count_metrics, intact, journal_until, listed, newest, none_left, read_index, usable


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Run:
    """A run with checkpoints of made content and a journal, each written when the journal had so many lines."""

    def __init__(self, home: Path):
        self.home, self.folder, self.journal = home, home / "checkpoints", home / "journal.jsonl"
        self.folder.mkdir()
        self.journal.write_bytes(b"")
        self.index: dict[str, Any] = {"checkpoints": []}
        self.warnings: list[str] = []

    def add(self, step: int, file: str | None = None, covers: bool = True) -> "Run":
        with self.journal.open("ab") as journal:
            journal.write(f'{{"step": {step}}}\n'.encode())
        content = f"weights of {step}".encode()
        name = file or f"step-{step:08d}.safetensors"
        (self.folder / name).write_bytes(content)
        told = self.journal.read_bytes()
        entry = {"step": step, "file": name, "sha256": sha256(content)} | ({"journal": [len(told), sha256(told)]} if covers else {})
        if name.startswith("best-"):
            self.index["best"] = entry
        else:
            self.index["checkpoints"].append(entry)
        write_checksummed_json(self.folder / INDEX, self.index)
        return self

    def path(self, step: int, kind: str = "step") -> Path:
        return self.folder / f"{kind}-{step:08d}.safetensors"

    def usable(self) -> list[tuple[int, bytes]]:
        self.warnings = []
        return [(entry["step"], path.read_bytes()) for entry, path in usable(self.folder, self.index, self.journal, self.warnings.append)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path).add(1).add(2).add(3)


def test_an_index_is_read_as_it_was_written_from_the_file_that_every_version_has_used(run: Run) -> None:
    assert INDEX == "index.json"
    assert read_index(run.folder) == run.index
    run.add(2, "best-00000002.safetensors")
    assert read_index(run.folder) == run.index
    assert listed(run.index) == [*run.index["checkpoints"], run.index["best"]]


def test_an_index_that_is_damaged_or_missing_is_none(run: Run) -> None:
    path = run.folder / INDEX
    path.write_text(path.read_text().replace('"step": 2', '"step": 4'))
    assert read_index(run.folder) is None
    path.unlink()
    assert read_index(run.folder) is None


@pytest.mark.parametrize("file", ["../journal.jsonl", "/etc/passwd", "other/step-00000009.safetensors"])
def test_an_index_that_names_a_file_elsewhere_is_none(file: str, run: Run) -> None:
    run.index["best"] = {"step": 9, "file": file, "sha256": ""}
    write_checksummed_json(run.folder / INDEX, run.index)
    assert read_index(run.folder) is None


def test_an_empty_index_is_an_index(tmp_path: Path) -> None:
    write_checksummed_json(tmp_path / INDEX, {"checkpoints": []})
    assert read_index(tmp_path) == {"checkpoints": []}


def test_a_file_that_is_not_what_was_written_is_refused_with_a_warning_that_says_how(run: Run) -> None:
    entry = run.index["checkpoints"][0]
    warnings: list[str] = []
    assert intact(run.folder, entry, warnings.append) == run.path(1)
    assert warnings == []
    run.path(1).write_bytes(b"weights of 0")
    assert intact(run.folder, entry, warnings.append) is None
    run.path(1).unlink()
    assert intact(run.folder, entry, warnings.append) is None
    path = run.path(1)
    assert warnings == [
        f"{path} is damaged: 12 bytes of another SHA-256",
        f"{path} is missing",
    ]


def test_a_file_that_is_missing_is_not_one_of_nothing_and_a_folder_is_none(tmp_path: Path) -> None:
    entry, warnings = {"file": "none", "sha256": sha256(b"")}, list[str]()
    assert intact(tmp_path, entry, warnings.append) is None
    (tmp_path / "none").mkdir()
    assert intact(tmp_path, entry, warnings.append) is None
    assert warnings[0] == f"{tmp_path / 'none'} is missing"
    assert warnings[1].startswith(f"{tmp_path / 'none'} is damaged: ")
    (tmp_path / "none").rmdir()
    (tmp_path / "none").write_bytes(b"")
    assert intact(tmp_path, entry, warnings.append) == tmp_path / "none"


def test_a_journal_is_known_by_its_length_and_digest_up_to_there(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    assert journal_until(None) == journal_until(journal) == [0, ""]
    journal.write_bytes(b"one\ntwo\n")
    assert journal_until(journal) == [8, sha256(b"one\ntwo\n")]
    assert journal_until(journal, 4) == [4, sha256(b"one\n")]
    assert journal_until(journal, 100) == [8, sha256(b"one\ntwo\n")]


def test_the_newest_intact_checkpoint_comes_first(run: Run) -> None:
    assert run.usable() == [(3, b"weights of 3"), (2, b"weights of 2"), (1, b"weights of 1")]
    assert run.warnings == []
    run.path(2).unlink()
    assert [step for step, _ in run.usable()] == [3, 1]
    assert run.warnings == [f"{run.path(2)} is missing"]


def test_the_order_given_is_left_as_it_was(run: Run) -> None:
    run.usable()
    assert [entry["step"] for entry in run.index["checkpoints"]] == [1, 2, 3]


def test_a_checkpoint_that_the_journal_does_not_reach_is_passed_over(run: Run) -> None:
    run.journal.write_bytes(run.journal.read_bytes()[:-1])
    assert [step for step, _ in run.usable()] == [2, 1]
    assert run.warnings == [f"{run.path(3)} does not go with the journal, which has been cut"]
    run.journal.write_bytes(run.journal.read_bytes().replace(b"2", b"7"))
    assert [step for step, _ in run.usable()] == [1]


def test_a_checkpoint_from_before_journals_were_covered_is_taken(tmp_path: Path) -> None:
    run = Run(tmp_path).add(1, covers=False).add(2)
    run.journal.unlink()
    assert [step for step, _ in run.usable()] == [1]


@pytest.mark.parametrize(("best", "order"), [(1, [3, 2, 1]), (2, [1, 3, 2]), (3, [2, 1, 3]), (4, [3, 2, 1])])
def test_where_the_best_model_is_damaged_what_lies_before_it_is_taken_first(best: int, order: list[int], run: Run) -> None:
    run.add(best, f"best-{best:08d}.safetensors")
    assert [step for step, _ in run.usable()] == [3, 2, 1]
    run.path(best, "best").write_bytes(b"")
    assert [step for step, _ in run.usable()] == order
    assert run.warnings == [f"{run.path(best, 'best')} is damaged: 0 bytes of another SHA-256"]


def test_without_checkpoints_nothing_is_usable_and_no_best_model_is_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path).add(2, "best-00000002.safetensors")
    run.path(2, "best").unlink()
    assert run.usable() == []
    assert run.warnings == []


def with_metrics(run: Run, *steps: int) -> None:
    lines = [{"kind": "metrics", "at": 0, "step": step, "values": {}} for step in steps]
    run.journal.write_text("".join(json.dumps(line) + "\n" for line in [{"kind": "checkpoint", "step": 1}, *lines]))


def test_of_a_journal_only_lines_of_metrics_up_to_a_step_are_counted(run: Run) -> None:
    with_metrics(run, 1, 2, 2, 3)
    assert [count_metrics(run.journal, step) for step in (0, 1, 2, 3, 4)] == [0, 1, 3, 4, 4]
    assert count_metrics(None, 4) == 0


def test_a_checkpoint_of_a_rebuilt_index_is_taken_if_the_journal_has_as_many_metrics(run: Run) -> None:
    for entry in run.index["checkpoints"]:
        del entry["journal"]
        entry["metrics"] = entry["step"]
    with_metrics(run, 1, 2, 3)
    assert [step for step, _ in run.usable()] == [3, 2, 1]
    with_metrics(run, 1, 2, 4)
    assert [step for step, _ in run.usable()] == [2, 1]
    assert run.warnings == [f"{run.path(3)} does not go with the journal, which has been cut"]
    assert [entry["step"] for entry, _ in usable(run.folder, run.index, None, print)] == [3, 2, 1]


def test_the_path_of_what_a_resume_takes_is_told(run: Run) -> None:
    assert newest(run.home) == str(run.path(3))
    run.path(3).unlink()
    assert newest(run.home) == str(run.path(2))
    run.journal.write_bytes(b"")
    assert newest(run.home) is None


def test_without_an_index_the_newest_file_is_told(run: Run) -> None:
    (run.folder / "best-00000009.safetensors").write_bytes(b"")
    (run.folder / INDEX).write_text(json.dumps({}))
    assert newest(run.home) == str(run.path(3))
    for step in (1, 2, 3):
        run.path(step).unlink()
    assert newest(run.home) is None


def test_that_none_is_left_is_an_error_of_the_machine_with_its_cure(tmp_path: Path) -> None:
    error = none_left(tmp_path / "checkpoints", 2)
    assert isinstance(error, MachineError)
    cure = f"; move {tmp_path} away to train from the beginning"
    assert str(error) == f"{tmp_path}/checkpoints: no good checkpoint is left of 2{cure}"
    told = f"{tmp_path}/checkpoints: no good checkpoint is left, and the journal tells of some{cure}"
    assert str(none_left(tmp_path / "checkpoints", 0)) == told
