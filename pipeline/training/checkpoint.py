"""Checkpoints: written whole, hashed, listed in an index; the newest good one is what a run resumes from.

Where the index is damaged it is made anew from the files. Training goes on while a file is written: what it holds is copied first.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from pipeline.files import atomic_write, fsync_path, write_checksummed_json
from pipeline.ranks import Ranks
from pipeline.runs.checkpoints import INDEX, count_metrics, journal_until, listed, none_left, read_index, sha256_of_file, usable
from pipeline.tracking.journal import CHECKPOINT, last, read
from pipeline.training.checkpoint_file import proven
from pipeline.training.shards import Shards, read_everywhere
from pipeline.training.state import MODEL, State

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run: rank 0 writes and reads the files, one tensor at a time.

    Where ranks hold parts, each copies its own, and rank 0 gets them beside the training. Files are written by an executor's thread, or
    without one before `save` returns.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks, journal: Path | None = None, executor: Executor | None = None):
        self._folder, self._keep, self._ranks, self._journal, self._executor = folder, keep, ranks, journal, executor
        # For the thread, where ranks hold parts.
        self._beside: Ranks | None = None
        self._pending: deque[Future[None]] = deque()
        self._written: deque[int] = deque()
        # The step of the newest checkpoint.
        self._saved = -1
        # True if the restored checkpoint was saved when a stop had cut the validation of its step short.
        self.validation_due = False
        # Step and accuracy of the best model of this start; the index knows of those before.
        self._best = -1, -1.0
        # True where it must not be lost with rank 0: the others are not a step further when it is written.
        self.awaits_best = False

    def restore(self, state: State) -> int:
        """Load the newest intact checkpoint and return its step; 0 if there is none yet."""
        facts, tensors = read_everywhere(self._ranks.on_rank_zero(self._newest, None), self._ranks)
        if not facts:
            return 0
        step, self.validation_due = int(facts["step"]), "validation_due" in facts
        state.load(tensors)
        self._saved = step
        if self._ranks.on_rank_zero(lambda: self._unannounced(step), False):
            # It was written, and its rank killed before the journal knew.
            self._written.append(step)
        return step

    @property
    def marks(self) -> dict[str, Any]:
        """What a rank must know of earlier saves."""
        return {"saved": self._saved, "best": self._best}

    def forget_saved(self) -> None:
        """Take nothing for saved: the ranks do not agree on it."""
        self._saved = -1

    def take(self, marks: dict[str, Any]) -> None:
        """Know what another rank knows."""
        self._saved, (step, accuracy) = marks["saved"], marks["best"]
        self._best = step, accuracy

    def written_by_another(self) -> None:
        """Rank 0 is another process than before, which may have ended while it wrote: take nothing for saved; every rank must call it."""
        self.forget_saved()
        index = self._ranks.on_rank_zero(self._index, {"checkpoints": []})
        self._written.extend(one["step"] for one in index["checkpoints"][-1:] if self._unannounced(one["step"]))

    def save(self, step: int, state: State, validation_due: bool = False) -> None:
        """Begin to save, unless already saved, and prune to `keep`; every rank must call it."""
        if step == self._saved:
            return
        due = {"validation_due": "true"} if validation_due else {}
        shards = self._copied(state, "")
        # Not before all ranks have come so far.
        before, self._saved = self._saved, step
        self._begin(self._ranks.on_rank_zero(lambda: self._writing(step, before, shards, due), shards.exchange))

    def save_best(self, state: State, step: int, accuracy: float) -> None:
        """Begin to save the model if its validation accuracy is the highest; of equals, the first is kept."""
        best_step, best = self._best
        if step != best_step and accuracy <= best:
            return
        self._best = step, accuracy
        shards = self._copied(state, MODEL)
        self._begin(self._ranks.on_rank_zero(lambda: lambda: self._write_best(shards, step, accuracy), shards.exchange))
        if self.awaits_best:
            self._wait_everywhere(0)

    def written(self) -> Iterator[int]:
        """Yield the steps that have been saved since the last call, for the journal; raises what a write raised."""
        while self._written:
            yield self._written.popleft()
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait until all is written."""
        self._wait_everywhere(0)

    def _unannounced(self, step: int) -> bool:
        return self._journal is not None and all(line["step"] != step for line in read(self._journal) if line["kind"] == CHECKPOINT)

    def _wait_everywhere(self, most: int) -> None:
        self._ranks.while_others_wait(lambda: self._wait(most))
        # Rank 0 has taken what the others gave.
        self._wait(most)

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            self._pending.popleft().result()

    def _begin(self, work: Callable[[], None]) -> None:
        if self._executor is None:
            work()
            return
        before = self._pending[-1] if self._pending else None

        def in_order() -> None:
            # Nothing is written after a write that failed: a checkpoint would not know its best model.
            if before is not None:
                before.result()
            work()

        self._pending.append(self._executor.submit(in_order))

    def _copied(self, state: State, prefix: str) -> Shards:
        """Copy what every rank has."""
        # A disk may be slower than the training, but no more than two copies are held.
        # A barrier too: a rank that raised in a check of its own does not come here, and then nothing of this step is saved.
        self._wait_everywhere(1)
        self._ranks.heartbeat.computing()
        if state.sharded and self._beside is None:
            self._beside = self._ranks.beside()
        return Shards(state, prefix, self._beside or self._ranks)

    def _writing(self, step: int, before: int, shards: Shards, due: dict[str, str]) -> Callable[[], None]:
        until = journal_until(self._journal)
        if self._journal is not None and until[0]:
            # A checkpoint must not survive a power cut that what it covers of the journal does not.
            fsync_path(self._journal)

        def work() -> None:
            self._write(step, before, shards, until, due)
            self._written.append(step)

        return work

    def _write(self, step: int, before: int, shards: Shards, until: list[Any], due: dict[str, str]) -> None:
        index = self._index()
        metrics = str(count_metrics(self._journal, step))
        content = shards.file(step=str(step), best=json.dumps(index.get("best")), metrics=metrics, **due)
        file = f"step-{step:08d}.safetensors"
        atomic_write(self._folder / file, content)
        # Not those that were refused when this run went on: they would push out good ones.
        entries = [entry for entry in index["checkpoints"] if entry["step"] < step and (before < 0 or entry["step"] <= before)]
        entries.append({"step": step, "file": file, "sha256": content.sha256, "journal": until})
        self._write_index(index | {"checkpoints": entries[-self._keep :]})

    def _write_best(self, shards: Shards, step: int, accuracy: float) -> None:
        index = self._index()
        best = index.get("best")
        if best is not None and best["step"] != step and best["accuracy"] >= accuracy:
            shards.exchange()
            return
        content = shards.file(step=str(step), accuracy=repr(accuracy))
        file = f"best-{step:08d}.safetensors"
        atomic_write(self._folder / file, content)
        self._write_index(index | {"best": {"step": step, "accuracy": accuracy, "file": file, "sha256": content.sha256}})

    def _newest(self) -> Path | None:
        index = self._index()
        if index["checkpoints"] and read_index(self._folder) is None:
            self._write_index(index)
        for entry, path in usable(self._folder, index, self._journal, log.warning):
            if entry is not index["checkpoints"][-1]:
                log.warning("going on from %s", path)
            return path
        if index["checkpoints"] or (self._journal is not None and last(self._journal, CHECKPOINT)):
            raise none_left(self._folder, len(index["checkpoints"]))
        return None

    def _index(self) -> dict[str, Any]:
        return read_or_rebuild_index(self._folder)

    def _write_index(self, index: dict[str, Any]) -> None:
        write_checksummed_json(self._folder / INDEX, index)
        # Only what the index does not name is removed, and last: a kill anywhere leaves what the index names.
        kept = {entry["file"] for entry in listed(index)}
        for path in [*self._folder.glob("*.safetensors"), *self._folder.glob(".*.partial")]:
            if path.name not in kept:
                path.unlink(missing_ok=True)


def read_or_rebuild_index(folder: Path) -> dict[str, Any]:
    """Return the index; if it is damaged or missing, one made from what the files say of themselves."""
    index = read_index(folder)
    if index is not None:
        return index
    files, path = sorted(folder.glob("*-*.safetensors")), folder / INDEX
    if files or path.exists():
        log.warning("%s is damaged or missing; it is made anew from %d files", path, len(files))
    return _index_of(folder, files)


def _index_of(folder: Path, files: list[Path]) -> dict[str, Any]:
    entries: dict[str, list[dict[str, Any]]] = {"step": [], "best": []}
    for file in files:
        facts = proven(file)
        if facts is not None:
            entry: dict[str, Any] = {"step": int(facts["step"]), "file": file.name, "sha256": sha256_of_file(file)}
            known = {name: json.loads(facts[name]) for name in ("accuracy", "best", "metrics") if name in facts}
            entries[file.name.partition("-")[0]].append(entry | known)
    written = [file for file in files if file.name.startswith("step-")]
    # A damaged list without a file may have named one.
    if not entries["step"] and (written or (folder / INDEX).exists()):
        raise none_left(folder, len(written))
    best = max(entries["best"], key=lambda one: (one["accuracy"], -one["step"]), default=None)
    # The newest checkpoint knows which it was, also where its file is damaged.
    for entry in entries["step"]:
        best = entry.pop("best") or best
    return {"checkpoints": entries["step"]} | ({"best": best} if best else {})
