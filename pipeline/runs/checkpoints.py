"""The index of a run's checkpoints: which are listed, which are intact, and which one a resume takes."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.config import MachineError
from pipeline.files import read_checksummed_json
from pipeline.tracking.journal import read

INDEX = "index.json"


def read_index(folder: Path) -> dict[str, Any] | None:
    """Return the index, oldest checkpoint first; None if it is missing or damaged."""
    index = read_checksummed_json(folder / INDEX)
    # An index from elsewhere may name any file, and what it no longer names is removed.
    if index is not None and all(Path(entry["file"]).name == entry["file"] for entry in listed(index)):
        return index
    return None


def listed(index: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all entries of an index, that of the best model too."""
    return [*index["checkpoints"], *([index["best"]] if "best" in index else [])]


def intact(folder: Path, entry: dict[str, Any], warn: Callable[[str], None]) -> Path | None:
    """Return a listed file's path, or None, after a warning, if it is not what was written."""
    path = folder / entry["file"]
    if path.is_file() and sha256_of_file(path) == entry["sha256"]:
        return path
    warn(f"{path} is " + (f"damaged: {path.stat().st_size} bytes of another SHA-256" if path.exists() else "missing"))
    return None


def sha256_of_file(path: Path) -> str:
    """Return a file's SHA-256; little of it is held at once."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def journal_until(journal: Path | None, size_bytes: int = -1) -> list[Any]:
    """Return the length of the journal, or of its first `size_bytes`, and the SHA-256 of that part."""
    if journal is None or not journal.exists():
        return [0, ""]
    with journal.open("rb") as file:
        content = file.read(size_bytes)
    return [len(content), hashlib.sha256(content).hexdigest()]


def count_metrics(journal: Path | None, until_step: int) -> int:
    """Return how many lines of metrics a journal has up to a step."""
    if journal is None:
        return 0
    return sum(line["kind"] == "metrics" and line["step"] <= until_step for line in read(journal))


def _is_covered(entry: dict[str, Any], journal: Path | None) -> bool:
    """Return True if the journal still has what it had when this checkpoint was written."""
    if "journal" in entry:
        return entry["journal"] == journal_until(journal, entry["journal"][0])
    # The index was rebuilt, and the file knows only the number.
    return journal is None or count_metrics(journal, entry["step"]) >= entry.get("metrics", 0)


def usable(folder: Path, index: dict[str, Any], journal: Path | None, warn: Callable[[str], None]) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield entry and path of every checkpoint that a resume may take, the one it takes first."""
    best = index.get("best")
    entries = index["checkpoints"][::-1]
    if entries and best is not None and intact(folder, best, warn) is None:
        # From before it, where that can be, the best model comes about again; a later one may beat it anyway.
        entries.sort(key=lambda entry: entry["step"] >= best["step"])
    for entry in entries:
        if not _is_covered(entry, journal):
            # Figures are written once: those that are gone come about again only from before them.
            warn(f"{folder / entry['file']} does not go with the journal, which has been cut")
            continue
        path = intact(folder, entry, warn)
        if path is not None:
            yield entry, path


def newest_step(run: Path) -> int:
    """Return the step of the checkpoint that a resume of this run takes, or 0."""
    path = newest(run)
    return step_of(Path(path)) if path else 0


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's name tells."""
    return int(path.stem.partition("-")[2])


def newest(run: Path) -> str | None:
    """Return the path of the checkpoint that a resume of this run takes, or None."""
    folder = run / "checkpoints"
    index = read_index(folder)
    if index is None:
        # Rank 0 rebuilds the index from the files, which takes torch.
        return max(map(str, folder.glob("step-*.safetensors")), default=None)
    found = next(usable(folder, index, run / "journal.jsonl", lambda _: None), None)
    return str(found[1]) if found else None


def none_left(folder: Path, count: int) -> MachineError:
    """There were checkpoints, and none is intact: never a silent start from nothing."""
    of = f" of {count}" if count else ", and the journal tells of some"
    return MachineError(f"{folder}: no good checkpoint is left{of}; move {folder.parent} away to train from the beginning")
