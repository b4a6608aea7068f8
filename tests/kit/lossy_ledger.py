"""What a run must still have, known from what was written to it: never from its index, nor from the code that reads it."""

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from pipeline.training import loop
from pipeline.training.checkpoint_file import weights_sha256
from tests.kit.lossy_kills import damage
from tests.kit.lossy_training import Plan, Watch, parts, train

# In memory: nothing here rests on the disk below.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
TOTAL, PER_EPOCH = 16, 4
# Name and step of a figure.
Key = tuple[str, int]


def plan_of(correct: tuple[int, ...], per_checkpoint: int) -> Plan:
    """Sixteen steps in four epochs, and how many answers of ten are correct after each."""
    return Plan(loop.Steps(TOTAL, PER_EPOCH, 1, per_checkpoint, 8), {(epoch + 1) * PER_EPOCH: right for epoch, right in enumerate(correct)})


def file_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}.safetensors"


def raw_figures(run: Path) -> list[tuple[Key, Any]]:
    """Every figure of learning in the whole lines of a run's journal."""
    path = run / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
    figures = [((name, line["step"]), value) for line in lines if line["kind"] == "metrics" for name, value in line["values"].items()]
    return [one for one in figures if "per_second" not in one[0][0] and not one[0][0].startswith("system/")]


class Unhurt:
    """The training left alone: state and model by step, figures, and the best step with its accuracy."""

    def __init__(self, correct: tuple[int, ...]):
        with tempfile.TemporaryDirectory(dir=MEMORY) as name:
            run = Path(name)
            self.states = train(run, TOTAL, plan=plan_of(correct, 1)).states
            self.figures = dict(raw_figures(run))
            files = {step: load_file(file_of(run, step)) for step in range(1, TOTAL + 1)}
        names = parts()[0].state_dict().keys()
        self.models = {step: weights_sha256({name: tensors[f"model.{name}"] for name in names}) for step, tensors in files.items()}
        self.best = (correct.index(max(correct)) + 1) * PER_EPOCH, max(correct) / 10

    def before(self, step: int) -> set[Key]:
        """The figures that are written before the checkpoint of a step."""
        return {key for key in self.figures if key[1] <= step}


unhurt_of = functools.cache(Unhurt)


class Ledger(Watch):
    """What one run has promised to keep, and what of it is there."""

    def __init__(self, run: Path, unhurt: Unhurt):
        self.run, self.unhurt = run, unhurt
        # Content of every checkpoint by step; and what the run keeps: after a kill one of several lists of steps.
        self.written: dict[int, bytes] = {}
        self.covered: dict[int, bytes] = {}
        self.kept: list[list[int]] = [[]]
        # What a start found and did.
        self.keep, self.newest, self.first = 1, 0, -1
        self.best_is_lost = False
        # By name, what a file was and what has become of it.
        self.damaged: dict[str, tuple[bytes, bytes]] = {}
        self.remember()

    def content(self, name: str) -> bytes:
        path = self.run / "checkpoints" / name
        return path.read_bytes() if path.exists() else b""

    def remember(self) -> None:
        """Note which model the run calls its best."""
        if not self.is_damaged("index.json"):
            self.best: dict[str, Any] | None = json.loads(self.content("index.json") or b"{}").get("best")

    def hurt(self, path: Path, how: str, share: float) -> None:
        """Damage a file, and know of it until it is written anew."""
        before = path.read_bytes()
        damage(path, how, share)
        good, _ = self.damaged.get(path.name, (before, b""))
        self.damaged[path.name] = good, self.content(path.name)

    def is_damaged(self, name: str) -> bool:
        good, bad = self.damaged.get(name, (b"", b""))
        return name in self.damaged and good != bad == self.content(name)

    def good(self) -> list[int]:
        """The steps of the checkpoints that are as they were written, with all figures before them in the journal."""
        there = {key for key, _ in raw_figures(self.run)}
        whole = [step for step, content in self.written.items() if self.content(file_of(self.run, step).name) == content]
        return sorted(step for step in whole if self.unhurt.before(step) <= there)

    def is_begun(self) -> bool:
        """Whether anything tells that there was a checkpoint."""
        journal = self.run / "journal.jsonl"
        told = journal.exists() and b'"kind": "checkpoint"' in journal.read_bytes()
        index = self.run / "checkpoints" / "index.json"
        if index.exists() and not self.is_damaged("index.json"):
            # It may name a best model alone, before the first checkpoint is listed.
            return told or bool(json.loads(index.read_bytes())["checkpoints"])
        return told or index.exists() or any(self.run.glob("checkpoints/step-*"))

    def may_be_restored(self) -> tuple[set[int], bool]:
        """Return the steps of which the next start must take one, and whether it may find none."""
        good, found, none = self.good(), set[int](), False
        journal = self.run / "journal.jsonl"
        uncut = journal.read_bytes() if journal.exists() else b""
        for kept in [good] if self.is_damaged("index.json") else self.kept:
            # Where only lines without a figure are cut off, a checkpoint may be refused.
            sure = [step for step in kept if step in good and uncut.startswith(self.covered[step])]
            least = max(sure, default=0)
            if self.best and self.is_damaged(self.best["file"]):
                # From before it, where that can be, the best model comes about again.
                least = max((step for step in sure if step < self.best["step"]), default=min(sure, default=0))
            found |= {step for step in good if step >= least}
            none |= not sure and self.is_begun()
            found |= {0} if not sure and not self.is_begun() else set()
        return found, none

    def restored(self, step: int, state: str) -> None:
        assert step in self.allowed, (step, self.allowed)
        assert not step or state == self.unhurt.states[step]
        self.newest = self.first = step
        # Where no checkpoint before it is left, nothing brings it back.
        self.best_is_lost |= self.best is not None and self.is_damaged(self.best["file"]) and step >= self.best["step"]

    def note(self, step: int, content: bytes) -> None:
        """Note a checkpoint, and the journal that it was written with."""
        self.written[step], self.covered[step] = content, (self.run / "journal.jsonl").read_bytes()

    def saved(self, step: int) -> None:
        self.note(step, file_of(self.run, step).read_bytes())
        self.kept = self._with(step)
        self.newest = step

    def _with(self, step: int) -> list[list[int]]:
        """A save drops what was refused when the run went on, and the oldest."""
        return [([one for one in kept if one <= self.newest and one != step] + [step])[-self.keep :] for kept in self.kept]

    def begin(self, keep: int) -> None:
        """A start begins."""
        self.allowed, self.none = self.may_be_restored()
        if self.is_damaged("index.json"):
            # It is made anew from the files.
            self.kept = [[step for step, content in sorted(self.written.items()) if self.content(file_of(self.run, step).name) == content]]
        self.keep, self.first = keep, -1

    def take_over(self, source: "Ledger") -> None:
        """This run has been made from another one."""
        for step, content in source.written.items():
            self.note(step, content)
        self.kept = [[step for step in kept if step in source.good()] for kept in source.kept]
        self.best_is_lost = source.best_is_lost
        self.best, self.damaged = source.best, dict(source.damaged)
        if source.is_damaged("index.json"):
            self.damaged["index.json"] = b"what it was", b""

    def killed(self) -> None:
        """A kill may have come before or after a save was listed."""
        for step in range(self.newest + 1, TOTAL + 1):
            content = self.content(file_of(self.run, step).name)
            if self.first >= 0 and content and content != self.written.get(step):
                self.note(step, content)
                self.kept += self._with(step)
                break
        self.remember()

    def ended(self, reached: int) -> None:
        """Every figure up to the step reached is there once, and of later ones none twice; half of nothing is left."""
        figures = raw_figures(self.run)
        assert len(figures) == len(dict(figures)), "a figure is there twice"
        assert all(self.unhurt.figures[key] == value for key, value in figures)
        assert self.unhurt.before(reached) <= {key for key, _ in figures}
        assert not [path for path in (self.run / "checkpoints").iterdir() if path.name.startswith(".")]
        self.remember()
        assert self.best or reached < PER_EPOCH
        if self.best and not self.best_is_lost:
            assert weights_sha256(load_file(self.run / "checkpoints" / self.best["file"])) == self.unhurt.models[self.best["step"]]
            assert reached < TOTAL or (self.best["step"], self.best["accuracy"]) == self.unhurt.best
