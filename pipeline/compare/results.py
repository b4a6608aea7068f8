"""One run, as its journal and its receipt tell it."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from pipeline.config import DataError
from pipeline.runs.claim import Claim, read_claim
from pipeline.runs.identity import flatten
from pipeline.tracking.journal import last, metrics_by_step, read
from pipeline.tracking.receipt import comparable, elapsed_seconds

# In pixels of a page, more points than these cannot be told apart.
MOST_POINTS = 400
JOURNAL = "journal.jsonl"
T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """A figure at a step; hours of training, where a journal says when it was."""

    step: int
    hours: float | None
    value: float


@dataclass(frozen=True)
class Result:
    """One run: what it is, where it ran, what it came to."""

    name: str
    # Of its journal: the same run may be found twice, as runs/<fingerprint> and as models/.
    journal: str
    fingerprint: str
    comparable: str
    settings: dict[str, Any]
    seed: int
    ranks: list[int]
    outcome: str
    step: int
    accuracy: float | None
    test_accuracy: float | None
    images_per_second: float | None
    hours: float | None
    weights_sha256: str | None
    dirty: bool
    curves: dict[str, list[Point]]

    @property
    def finished(self) -> bool:
        return self.weights_sha256 is not None

    @property
    def global_batch(self) -> int:
        return int(self.settings["dist.global_batch"])


def within(what: Path) -> list[Path]:
    """Return the runs of a folder such as runs/, or that which is named itself."""
    if (what / JOURNAL).exists() or (what / "receipt.json").exists():
        return [what]
    return sorted(path.parent for path in what.glob(f"*/{JOURNAL}")) or [what]


def read_result(what: Path, runs: Path) -> Result:
    """Read a receipt, a folder with one, or the folder of a run; DataError or ConfigError if it is none of these."""
    claim = read_claim(what, runs)
    journal, receipt = claim.run / JOURNAL, claim.receipt
    dist = claim.identity.get("dist")
    if "seed" not in claim.identity or not isinstance(dist, dict) or "global_batch" not in dist:
        raise DataError(f"{what}: its identity lacks the seed or the global batch; move it away")
    told = journal.exists()
    steps = metrics_by_step(journal) if told else {}
    figures = {name: value for values in steps.values() for name, value in values.items()}
    curves = journaled_curves(journal) if told else receipt_curves(claim)
    accuracies = [point.value for point in curves["validation/accuracy"]]
    rates = [values["train/images_per_second"] for values in steps.values() if "train/images_per_second" in values]
    ended = [line["outcome"] for line in read(journal) if line["kind"] == "ended" and line["stage"] == "train"] if told else []
    hours = figures.get("total/hours", elapsed_seconds(journal) / 3600) if told else None
    return Result(
        name=str(what),
        journal=receipt.journal if receipt else last(journal, "run")["id"],
        fingerprint=receipt.fingerprint if receipt else claim.run.name,
        comparable=comparable(claim.identity),
        settings=flatten(claim.identity),
        seed=claim.identity["seed"],
        ranks=journaled_ranks(journal) if told else [receipt.placement.get("world_size", 0)] if receipt else [],
        outcome="done" if receipt else ended[-1] if ended else "unfinished",
        step=receipt.steps if receipt else max(steps, default=0),
        accuracy=receipt.best.validation_accuracy if receipt else max(accuracies, default=None),
        test_accuracy=figures.get("test/accuracy"),
        images_per_second=median(rates) if rates else None,
        hours=hours,
        weights_sha256=receipt.weights_sha256 if receipt else None,
        dirty=bool(receipt and receipt.git.get("dirty")),
        curves=curves,
    )


def journaled_ranks(journal: Path) -> list[int]:
    """Return the world sizes of a training's starts, each once."""
    sizes = [line["tags"].get("lockstep.world_size") for line in read(journal) if line["kind"] == "started" and line["stage"] == "train"]
    return list(dict.fromkeys(int(size) for size in sizes if size))


def journaled_curves(journal: Path) -> dict[str, list[Point]]:
    """Return losses and validation accuracy by step and hours; time between a stop and the next start does not count."""
    found: dict[str, list[Point]] = {"train/loss": [], "validation/loss": [], "validation/accuracy": []}
    before, spent = 0, 0
    for line in read(journal):
        now = int(line.get("at", before))
        if line["kind"] not in ("run", "started"):
            # Figures of a run that was resumed from are older than the line that begins this one.
            spent += max(0, now - before)
        before = now
        if line["kind"] == "metrics":
            for name, value in line["values"].items():
                if name in found:
                    found[name].append(Point(line["step"], spent / 3.6e6, value))
    return found


def receipt_curves(claim: Claim) -> dict[str, list[Point]]:
    """Return what a receipt says of every epoch, where the journal is elsewhere."""
    found: dict[str, list[Point]] = {"train/loss": [], "validation/loss": [], "validation/accuracy": []}
    for end in claim.receipt.epochs if claim.receipt else ():
        found["train/loss"].append(Point(end.step, None, float.fromhex(end.train_loss)))
        found["validation/loss"].append(Point(end.step, None, float.fromhex(end.validation_loss)))
        found["validation/accuracy"].append(Point(end.step, None, end.validation_accuracy))
    return found


def thinned(points: list[T]) -> list[T]:
    """Return every n-th point, and the last one."""
    every = -(-len(points) // MOST_POINTS)
    return points if every <= 1 else [*points[:-1:every], points[-1]]
