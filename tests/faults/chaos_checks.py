"""What must be true after every ending of a start, and at the end of an experiment; every check yields what is wrong."""

import contextlib
import hashlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipeline.runs.checkpoints import read_index
from tests.faults.chaos_faults import KILL, Start

PROVEN = ("weights_sha256", "model_sha256", "steps", "best", "epochs")
# What a rank that lost its launcher may take to save, and what anyone may take to leave.
GRACE_SECONDS, LEAVE_SECONDS = 60, 5


@dataclass
class Before:
    """What there was when a start began."""

    status: str | None
    started: int


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The journal's whole lines; none where it cannot be read."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for line in (run / "journal.jsonl").read_bytes().splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def before(run: Path) -> Before:
    """To be compared with what is there after the start."""
    path = run / "status.json"
    return Before(path.read_text(errors="replace") if path.exists() else None, sum(line["kind"] == "started" for line in lines_of(run)))


def figures(run: Path) -> Counter[tuple[Any, ...]]:
    """Every value of every metric, but for speeds, hours and what machines are busy with."""
    return Counter(
        (name, line["step"], value)
        for line in lines_of(run)
        if line["kind"] == "metrics"
        for name, value in line["values"].items()
        if "per_second" not in name and not name.startswith(("total/", "system/"))
    )


def losses_in_mlflow(folder: Path) -> tuple[list[str], list[int]]:
    """The statuses of all runs, and the steps of all points of the training loss."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as store:
        statuses = [row[0] for row in store.execute("select status from runs")]
        return statuses, sorted(row[0] for row in store.execute("select step from metrics where key = 'train/loss'"))


def good(run: Path, harmed: dict[Path, str]) -> list[Path]:
    """The checkpoints on the disk that we have neither harmed nor left without their part of the journal."""
    cut_off = uncovered(run, harmed)
    there = [path for path in (run / "checkpoints").glob("step-*.safetensors") if path.name not in cut_off]
    if index := read_index(run / "checkpoints"):
        # A start takes no other than those.
        names = {one["file"] for one in index["checkpoints"]}
        there = [path for path in there if path.name in names]
    return [path for path in there if harmed.get(path) != sha256(path)]


def uncovered(run: Path, harmed: dict[Path, str]) -> set[str]:
    """The checkpoints that a journal which we have cut no longer covers: figures are written once, and cannot be made up."""
    journal, index = run / "journal.jsonl", read_index(run / "checkpoints")
    if journal not in harmed:
        return set()
    if index is None:
        # What it knew of the journal is lost, and what the files know is for the product to say.
        return {path.name for path in (run / "checkpoints").glob("step-*.safetensors")}
    steps = [line["step"] for line in lines_of(run) if line["kind"] == "metrics"]
    found: set[str] = set()
    for one in index["checkpoints"]:
        if "journal" in one:
            size, digest = one["journal"]
            covered = hashlib.sha256(journal.read_bytes()[:size]).hexdigest() == digest
        else:
            covered = sum(step <= one["step"] for step in steps) >= one.get("metrics", 0)
        if not covered:
            found.add(one["file"])
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def beyond_repair(run: Path, harmed: dict[Path, str]) -> bool:
    """Whether we have left no good checkpoint, or no good best model: then a start may refuse."""
    steps = any(path.name.startswith("step-") for path in harmed) or uncovered(run, harmed)
    best = [path for path, digest in harmed.items() if path.name.startswith("best-") and path.exists() and sha256(path) == digest]
    return bool(best or (steps and not good(run, harmed)))


def wrong_ending(start: Start, code: int, old: Before) -> Iterator[str]:
    """Exit code, words and status of a start that has ended."""
    code = {-15: 143, -2: 130}.get(code, code)
    said = start.errors.read_text(errors="replace")
    if code not in start.allowed:
        yield f"exit {code} where {sorted(start.allowed)} are right: {' / '.join(said.splitlines()[-2:])[-300:]}"
    if "Traceback" in said:
        yield f"traceback: {said.strip().splitlines()[-1][:200]}"
    yield from wrong_status(start, code, old)


def wrong_status(start: Start, code: int, old: Before) -> Iterator[str]:
    """What status.json says, compared with the truth."""
    now = before(start.run)
    began = now.started > old.started
    if now.status == old.status and not began:
        return
    if now.status is None:
        yield "no status.json though the run has begun"
        return
    try:
        status = json.loads(now.status)
    except ValueError:
        yield "status.json is not JSON"
        return
    if code == -KILL:
        ends = [line for line in lines_of(start.run) if line["kind"] in ("started", "ended")]
        if status["outcome"] != "running" and (not ends or ends[-1].get("outcome") != status["outcome"]):
            yield f"status.json says {status['outcome']} after a kill"
    elif status["exit_code"] != code:
        yield f"status.json says {status['outcome']}, {status['exit_code']}, where the exit code is {code}"
    if status["checkpoint"] and not Path(status["checkpoint"]).exists():
        yield f"status.json ({status['outcome']}) names {Path(status['checkpoint']).name}, which is not there"


def words_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()[1:4])
    return "gone"


def left_behind(start: Start) -> Iterator[str]:
    """Processes that outlive their start for too long; they are ended then."""
    until = time.monotonic() + LEAVE_SECONDS
    if start.died_at is not None:
        until = max(until, start.died_at + GRACE_SECONDS + LEAVE_SECONDS)
    while left := start.left():
        if time.monotonic() > until:
            yield f"left behind: {'; '.join(map(words_of, left))}"
            start.power_cut()
            return
        time.sleep(0.2)


def wrong_result(folder: Path, run: Path, reference: Path) -> Iterator[str]:
    """An experiment that is done and sent to MLflow, compared with the one left alone."""
    mine, theirs = (json.loads((one / "models" / "receipt.json").read_text()) for one in (folder, reference))
    for key in PROVEN:
        if mine[key] != theirs[key]:
            yield f"receipt: {key} is {str(mine[key])[:150]}, not {str(theirs[key])[:150]}"
    if sha256(folder / "models" / "model.safetensors") != mine["model_sha256"]:
        yield "models/model.safetensors is not what the receipt names"
    found, right = figures(run), figures(reference / "runs" / run.name)
    if lacking := right - found:
        yield f"journal lacks {len(lacking)} values, such as {min(lacking)}"
    if surplus := found - right:
        yield f"journal has {len(surplus)} values too many, such as {min(surplus)}"
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    for entry in [*index["checkpoints"], index["best"]]:
        path = run / "checkpoints" / entry["file"]
        if not path.exists() or sha256(path) != entry["sha256"]:
            yield f"index.json lists {path.name}, which is {'damaged' if path.exists() else 'missing'}"
    statuses, steps = losses_in_mlflow(folder)
    _, right_steps = losses_in_mlflow(reference)
    if statuses != ["FINISHED"]:
        yield f"MLflow's runs are {statuses}"
    if steps != right_steps:
        twice, never = Counter(steps) - Counter(right_steps), Counter(right_steps) - Counter(steps)
        yield f"MLflow has {twice.total()} points of train/loss too many and lacks {never.total()}"
