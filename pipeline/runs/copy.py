"""A copy of a run in object storage, for machines whose disk goes with them.

It has the newest checkpoint, the best model, the journal, and what a finished run is published from.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import Any

from pipeline.config import MachineError
from pipeline.files import atomic_folder, atomic_write, checksummed_json, fsync_path, make_folder
from pipeline.runs import checkpoints
from pipeline.runs.identity import IDENTITY
from pipeline.runs.object_storage import VARIABLE, Listed, Missing, Place, Refused, Replaced, configured, one_line
from pipeline.tracking.journal import last

JOURNAL, STATE = "journal.jsonl", "copy.json"
# What a start on another machine needs, beside journal and checkpoints; and what a finished run is published from.
NAMES = (IDENTITY, "params.yaml", "receipt.json", "model.safetensors", "model.pt2", "eval.json", "predictions.csv", "diverged.json")
# For how long a start asks a store that does not answer: a machine that has just booted may have no name server or role yet.
PATIENCE_SECONDS, PAUSE_SECONDS = 30.0, 2.0


class Copy:
    """The copy of one run."""

    def __init__(self, run: Path, bucket: str, prefix: str, progress: Callable[[int], None] = lambda _: None):
        self._run, self._place = run, Place(bucket, prefix, run.name, progress)
        self.address = self._place.address
        # The list that this process has put, and the checkpoints' index that it was made from.
        self._listed: Listed | None = None
        self._index: dict[str, Any] | None = None

    def send(self, ending: bool = False) -> None:
        """Make the copy what the run is now, if it has a new checkpoint or ends; raises MachineError if storage does not take it."""
        with one_line("upload failed"), ExitStack() as opened:
            index = newest_only(checkpoints.read_index(self._run / "checkpoints"))
            if index is None or (index == self._index and not ending):
                return
            step = max((int(one["step"]) for one in index["checkpoints"]), default=0)
            before = self._listed or self._of_this_run(step)
            # The training may remove any of them; opened files stay.
            files = {name: opened.enter_context((self._run / name).open("rb")) for name in self._names(index)}
            listed = {name: self._put(file, before) for name, file in files.items()}
            # The journal after the index, which must not name what the journal has not.
            listed[f"checkpoints/{checkpoints.INDEX}"] = self._put(checksummed_json(index), before)
            listed[JOURNAL] = self._put(self._whole_lines(), before)
            if before is None or listed != before.files or step != before.step:
                self._replace_list(step, listed, before)
            self._index = index

    def _of_this_run(self, step: int) -> Listed | None:
        """Return what the list says before this process has put one; raises MachineError if it is not to be replaced."""
        found = self._place.read_list()
        if found and found.run != self._run_id():
            whose = f"{self.address} is the copy of another run of this experiment, at step {found.step}"
            raise Refused(f"{whose}; remove it (aws s3 rm --recursive {self.address}), or set another prefix")
        if found and found.step > step:
            raise MachineError(f"{self.address} is at step {found.step}, this run at {step}: it stays until this run has come so far")
        return found

    def _names(self, index: dict[str, Any]) -> list[str]:
        """Return the names of all files that belong to the copy now, but index and journal."""
        rest = [*NAMES, *(f"plots/{path.name}" for path in (self._run / "plots").glob("[!.]*.*"))]
        return [f"checkpoints/{one['file']}" for one in checkpoints.listed(index)] + [one for one in rest if (self._run / one).is_file()]

    def _put(self, content: BufferedReader | bytes, before: Listed | None) -> str:
        """Return the name of the object that has this content; uploads it if there is none."""
        if isinstance(content, bytes):
            sha256 = hashlib.sha256(content).hexdigest()
        else:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
            content.seek(0)
        there = [one for one in (before.files.values() if before else ()) if one.endswith(f"/{sha256}")]
        return there[0] if there else self._place.upload(sha256, content)

    def _replace_list(self, step: int, files: dict[str, str], before: Listed | None) -> None:
        first = self._listed is None
        try:
            self._listed = self._place.replace_list(self._run_id(), step, files, before)
        except Replaced:
            if not first:
                raise Refused(f"{self.address}: another start of this run sends its copy now") from None
            # Who has replaced it removes what it does not list.
            self._place.begin()
            raise MachineError(f"{self.address} was replaced meanwhile, and is read again") from None
        for name in set(before.files.values()) - set(files.values()) if before else ():
            self._place.remove(name)
        if first:
            self._place.remove_unlisted(self._listed)

    def _run_id(self) -> str:
        return last(self._run / JOURNAL, "run").get("id", "")

    def _whole_lines(self) -> bytes:
        return (self._run / JOURNAL).read_bytes().rpartition(b"\n")[0] + b"\n"

    def fetch(self) -> int | None:
        """Fetch the copy; returns its step, or None if there is none. Until all is there, the run has not begun."""
        with one_line(f"cannot be read for {self._run.name}; unset {VARIABLE} to begin without it"):
            found = self._place.read_list()
            while found is not None:
                try:
                    self._fetch_files(found.files)
                    return found.step
                except Missing as name:
                    again = self._place.read_list()
                    if again is not None and again.version == found.version:
                        raise self._place.damaged(str(name)) from None
                    # Who sends it has replaced it meanwhile.
                    found = again
        return None

    def _fetch_files(self, files: dict[str, str]) -> None:
        make_folder(self._run)
        with atomic_folder(self._run / "checkpoints") as scratch:
            for name, place in files.items():
                if name != JOURNAL:
                    inside = name.startswith("checkpoints/")
                    self._download(name, place, scratch / Path(name).name if inside else self._run / name)
        # Last: without a journal nothing else counts.
        self._download(JOURNAL, files[JOURNAL], self._run / JOURNAL)

    def _download(self, name: str, place: str, path: Path) -> None:
        make_folder(path.parent)
        # A checkpoint may be larger than the memory.
        partial = path.with_name(f".{path.name}.partial")
        try:
            self._place.download(place, partial)
        except Missing:
            raise Missing(name) from None
        if checkpoints.sha256_of_file(partial) != place.rpartition("/")[2]:
            partial.unlink()
            raise self._place.damaged(name)
        fsync_path(partial)
        os.replace(partial, path)
        fsync_path(path.parent)


def newest_only(index: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return an index of the newest checkpoint and the best model alone: in the copy nothing is damaged by a crash."""
    return None if index is None else index | {"checkpoints": index["checkpoints"][-1:]}


def fetch(run: Path, say: Callable[[str], None]) -> None:
    """Fetch a run that this machine does not have, if there is a copy."""
    where = configured()
    if where is None or (run / JOURNAL).exists():
        return
    until = time.monotonic() + PATIENCE_SECONDS
    said = False
    while True:
        try:
            copy = Copy(run, *where)
            step = copy.fetch()
            break
        except MachineError as error:
            if isinstance(error, Refused) or time.monotonic() > until:
                raise
            if not said:
                say(f"{error}; it is asked again for {PATIENCE_SECONDS:.0f} s")
            said = True
            time.sleep(PAUSE_SECONDS)
    if step is not None:
        say(f"fetched {run} from {copy.address}, at step {step}")


def write_state(run: Path, error: str | None, complete: bool = False) -> None:
    """Write down what went wrong last, and whether the copy has all of an ended run, for whoever waits for it."""
    with contextlib.suppress(OSError):
        atomic_write(run / STATE, json.dumps({"error": error, "complete": complete}).encode())


def read_state(run: Path) -> dict[str, Any]:
    """Return that, or nothing."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((run / STATE).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def is_incomplete(run: Path) -> bool:
    """Return True if a run that is copied has something that its copy lacks."""
    return configured() is not None and read_state(run).get("complete") is False
