"""The journal: what happened in a run, one JSON object a line, appended by one process at a time."""

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from pipeline.config import MachineError
from pipeline.files import fsync_path, make_folder

# The kind of the line behind a saved checkpoint: a run that has one and finds no file has lost them.
CHECKPOINT = "checkpoint"
# The kind of the line that says how lanes were shared out by speed.
LANES = "lanes"
# The kind of the line that says how many ranks there are from a step on.
RANKS = "ranks"
# The folder of the files, in a run's folder and in MLflow.
CHECKPOINTS = "checkpoints"
NUMBER = (int, float)
# What a line of a kind has at least.
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "run": {"at": int, "id": str, "experiment": str, "name": str, "params": dict, "tags": dict},
    "started": {"stage": str, "tags": dict},
    "metrics": {"at": int, "step": int, "values": dict},
    CHECKPOINT: {"step": int},
    LANES: {"per_rank": list},
    RANKS: {"step": int, "ranks": int},
    "note": {"text": str},
    "stopped": {"step": int},
    "finished": {"step": int, "weights_sha256": str},
    "attempt-ended": {"elapsed_seconds": NUMBER},
    "tags": {"tags": dict},
    "description": {"text": str, "images": list},
    "artifact": {"path": str},
    "model": {"path": str, "shape": list},
    "evaluated": {"model": str, "accuracy": NUMBER, "clean": bool, "tests": str},
    "ended": {"at": int, "stage": str, "outcome": str},
}


class Writer(Protocol):
    """What the loop writes to."""

    def metrics(self, values: dict[str, float], step: int) -> None: ...
    def event(self, kind: str, **fields: Any) -> None: ...


class Silent:
    """The journal of ranks other than the first."""

    def metrics(self, values: dict[str, float], step: int) -> None:
        """Nothing."""

    def event(self, kind: str, **fields: Any) -> None:
        """Nothing."""


class Notes(logging.Handler):
    """Copies warnings to the journal, which the launcher shows; a rank's own log is read by nobody."""

    def __init__(self, journal: Writer):
        super().__init__(logging.WARNING)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        """Journal a warning; an error is this rank's exit reason, which the launcher prints."""
        if record.levelno < logging.ERROR:
            # A full disk ends a training when it is to be saved, and not by a warning.
            with contextlib.suppress(OSError):
                self._journal.event("note", text=record.getMessage())


class Journal:
    """Appends to a journal; a metric that already has a value at a step, from before a restart, is not written twice."""

    def __init__(self, path: Path):
        make_folder(path.parent)
        self._path = path
        self._one_line = threading.Lock()
        self._known: dict[str, int] = {}
        for line in read(path):
            if line["kind"] == "metrics":
                self._known.update(dict.fromkeys(line["values"], line["step"]))
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        _drop_torn_lines(path)
        # Its name, without which its content is lost in a power cut.
        fsync_path(path.parent)

    def metrics(self, values: dict[str, float], step: int) -> None:
        """Write the values of one step."""
        fresh = {name: value for name, value in values.items() if step > self._known.get(name, -1)}
        if fresh:
            self._known.update(dict.fromkeys(fresh, step))
            self.event("metrics", step=step, values=fresh)

    def event(self, kind: str, **fields: Any) -> None:
        """Write a line of any other kind."""
        line = (json.dumps({"kind": kind, "at": round(time.time() * 1000)} | fields) + "\n").encode()
        # A thread that writes checkpoints may have a warning for the journal.
        with self._one_line:
            before = os.fstat(self._file).st_size
            try:
                written = os.write(self._file, line)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            if written < len(line):
                # The disk is full: half a line must not be in the way of the next one.
                os.ftruncate(self._file, before)
        if written < len(line):
            needed = f"{os.strerror(errno.ENOSPC)}: {len(line)} bytes are needed, {written} were free"
            raise OSError(errno.ENOSPC, needed, str(self._path))

    def sync(self) -> None:
        """Wait until it is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Tail:
    """Reads a journal while it grows: whole lines only, each once."""

    def __init__(self, path: Path, offset: int = 0):
        self._path, self.offset = path, offset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the new lines; `offset` is the end of the last one yielded. Raises MachineError if one is damaged."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(max(self.offset - 1, 0))
            if self.offset and file.read(1) != b"\n":
                # After a power cut the journal may be shorter than what was read of it.
                self.offset = 0
            file.seek(self.offset)
            for line in file:
                if _is_torn(line):
                    return
                self.offset += len(line)
                fields = _parsed(line)
                if fields is None:
                    where = f"{self._path}: is damaged before byte {self.offset}"
                    raise MachineError(f"{where}; move {self._path.parent} away to train again")
                yield fields


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return a line's fields, or None if it lacks one that its kind has."""
    try:
        fields: dict[str, Any] = json.loads(line)
        required = FIELDS.get(fields["kind"], {})
        if not all(isinstance(fields[name], kind) for name, kind in required.items()):
            return None
        return fields if all(isinstance(value, NUMBER) for value in fields.get("values", {}).values()) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Return every whole line of a journal; a torn last line is still being written."""
    return iter(Tail(path))


def reached(path: Path, evaluated: bool) -> int:
    """Return the step that a run has come to; an evaluation has none of its own, and its figures are journaled for the best one."""
    return int(last(path, *(() if evaluated else ("metrics",)), "finished", "stopped").get("step", 0))


def metrics_by_step(path: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of every step, in the order of steps."""
    found: dict[int, dict[str, float]] = {}
    for line in read(path):
        if line["kind"] == "metrics":
            found.setdefault(line["step"], {}).update(line["values"])
    return dict(sorted(found.items()))


def last(path: Path, *kinds: str) -> dict[str, Any]:
    """Return the newest line of some kinds, or an empty one."""
    found: dict[str, Any] = {}
    for line in read(path):
        if line["kind"] in kinds:
            found = line
    return found


def _is_torn(line: bytes) -> bool:
    """Return True if a line was not written whole: a kill leaves half of it, a power cut also zeros, even before whole lines."""
    return not line.endswith(b"\n") or b"\0" in line


def _drop_torn_lines(path: Path) -> None:
    """Cut a journal off before its first torn line, so that the next line stands alone."""
    whole = 0
    with path.open("rb") as file:
        for line in file:
            if _is_torn(line):
                os.truncate(path, whole)
                return
            whole += len(line)
