"""A few faults of the campaign; `make chaos` does many."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.files import write_checksummed_json
from pipeline.runs.checkpoints import journal_until
from tests.faults.chaos_checks import beyond_repair, sha256
from tests.faults.chaos_faults import BETWEEN, ENDING, PASSING
from tests.faults.chaos_plans import plan_of
from tests.kit.experiment import ROOT, clean_environment


def seed() -> int:
    """One for every commit: what is not done in one run of the tests is done in another, and a failure can be repeated."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout[:7], 16) if done.returncode == 0 else 1


@pytest.mark.parametrize("seed", range(1, 20))
def test_a_hundred_faults_are_of_every_kind(seed: int) -> None:
    planned: list[str] = []
    for number in itertools.count(1):
        for live, between in plan_of(seed, True, number):
            planned += [fault.kind for fault in (*live, *between)]
        if len(planned) >= 100:
            break
    assert {*PASSING, *ENDING, *BETWEEN} <= set(planned[:100])
    assert plan_of(seed, True, 7) == plan_of(seed, True, 7) != plan_of(seed + 1, True, 7)


LINES = [b'{"kind": "metrics", "step": %d, "values": {}}\n' % step for step in range(4)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints after two and four lines of its journal."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "journal.jsonl").write_bytes(b"".join(LINES))
    entries = [{"file": f"step-{step}.safetensors", "step": step} for step in (1, 3)]
    for entry in entries:
        (tmp_path / "checkpoints" / str(entry["file"])).touch()
        entry["journal"] = journal_until(tmp_path / "journal.jsonl", len(b"".join(LINES[: int(entry["step"]) + 1])))
    write_checksummed_json(tmp_path / "checkpoints" / "index.json", {"checkpoints": entries})
    return tmp_path


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize("kept_lines", range(1, 5))
def test_a_start_may_refuse_a_journal_that_was_cut_before_all_checkpoints(kept_lines: int, rebuilt: bool, run: Path) -> None:
    journal, index = run / "journal.jsonl", run / "checkpoints" / "index.json"
    if rebuilt:
        # From the files, which know how many lines of metrics there were.
        entries = [entry | {"metrics": entry["step"] + 1} for entry in json.loads(index.read_text())["checkpoints"]]
        for entry in entries:
            del entry["journal"]
        write_checksummed_json(index, {"checkpoints": entries})
    journal.write_bytes(b"".join(LINES[:kept_lines]))
    assert not beyond_repair(run, {})
    # What the start writes behind the cut changes nothing.
    for grown in (b"", b'{"kind": "note", "text": "cut"}\n' * 9):
        journal.write_bytes(journal.read_bytes() + grown)
        assert beyond_repair(run, {journal: "cut"}) == (kept_lines < 2)


def test_a_start_may_refuse_where_the_covered_checkpoint_is_harmed_or_none_is_listed(run: Path) -> None:
    journal, older = run / "journal.jsonl", run / "checkpoints" / "step-1.safetensors"
    older.write_bytes(b"harmed")
    assert not beyond_repair(run, {older: sha256(older)})
    journal.write_bytes(b"".join(LINES[:3]))
    assert not beyond_repair(run, {journal: "cut"})
    assert beyond_repair(run, {journal: "cut", older: sha256(older)})
    # A kill may come between a checkpoint and the index that lists it.
    orphan = run / "checkpoints" / "step-5.safetensors"
    orphan.touch()
    assert beyond_repair(run, {journal: "cut", older: sha256(older)})
    orphan.unlink()
    (run / "checkpoints" / "index.json").write_bytes(b"damaged")
    assert not beyond_repair(run, {older: sha256(older)})
    assert beyond_repair(run, {journal: "cut"})


@pytest.mark.slow
@pytest.mark.chaos
def test_random_faults_change_no_bit_and_leave_nothing_behind() -> None:
    words = [sys.executable, "-m", "tests.faults.chaos", f"--seed={seed()}", "--faults=4", "--jobs=1"]
    done = subprocess.run(words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 violations" in done.stdout
    if os.geteuid() != 0:
        pytest.skip("all else was done, but no disk was filled: only root can mount a small one")
