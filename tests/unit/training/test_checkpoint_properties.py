"""What holds for checkpoints whatever is done to their files."""

import os
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from pipeline.config import MachineError
from pipeline.runs.checkpoints import intact
from pipeline.training.checkpoint import INDEX, Checkpoints, read_or_rebuild_index
from pipeline.training.checkpoint_file import weights_sha256
from pipeline.training.state import State
from tests.unit.training.test_checkpoint import SingleNode

# The same examples in every run; a machine that is busy is no failure.
FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=100)
# In memory: every save waits for its file to be on the disk, which takes longer than all the rest.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Training:
    """A training of two weights and a bias from its newest checkpoint, and what it has at every step it saves."""

    def __init__(self, home: Path, keep: int):
        self._model = nn.Linear(2, 2)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        self._checkpoints = Checkpoints(home, keep, SingleNode())
        self.step = self._checkpoints.restore(State(self._model, self._optimizer))

    @property
    def state(self) -> str:
        """The digest of weights and momenta."""
        momenta = self._optimizer.state_dict()["state"]
        return weights_sha256(self._model.state_dict() | {str(key): value["momentum_buffer"] for key, value in momenta.items()})

    def save(self, steps: int, draw: int) -> None:
        """Go on for some steps, the last with a gradient of its own, and save."""
        self.step += steps
        for parameter in self._model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(draw))
        self._optimizer.step()
        self._checkpoints.save(self.step, State(self._model, self._optimizer))

    def save_best(self, accuracy: float) -> str:
        self._checkpoints.save_best(State(self._model, self._optimizer), self.step, accuracy)
        return weights_sha256(self._model.state_dict())


# How a file is damaged: what is done, and where in the file, as a share of its length.
DAMAGE = st.tuples(st.sampled_from(["truncate", "flip", "flip", "delete"]), st.floats(0, 1, exclude_max=True))


def damage(path: Path, kind: str, share: float) -> None:
    content = bytearray(path.read_bytes())
    if kind == "delete" or not content:
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(content[: int(share * len(content))])
    else:
        bit = int(share * len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)


class Store:
    """A run that trains, is killed, and goes on, while its disk does what it likes to files of its own."""

    def __init__(self, home: Path, keep: int):
        self.home, self.keep, self.draws = home, keep, 0
        self.start_again()

    def start_again(self) -> None:
        # By the name of a step's file: the step, what was written then, and the digest of the weights and momenta.
        self.written: dict[str, tuple[int, bytes, str]] = {}
        self.best: tuple[int, float] | None = None
        self.accuracy: dict[int, float] = {}
        self.training = Training(self.home, self.keep)
        assert self.training.step == 0

    def listed(self) -> list[str]:
        return [entry["file"] for entry in read_or_rebuild_index(self.home)["checkpoints"]]

    def good(self) -> list[str]:
        """The listed files that are as they were written, from old to new."""
        paths = {name: self.home / name for name in self.listed()}
        return [name for name, path in paths.items() if path.exists() and path.read_bytes() == self.written[name][1]]

    def save(self, steps: int) -> None:
        before = [name for name in self.good() if self.written[name][0] <= self.training.step]
        self.draws += 1
        self.training.save(steps, self.draws)
        entry = read_or_rebuild_index(self.home)["checkpoints"][-1]
        assert entry["step"] == self.training.step
        self.written[entry["file"]] = self.training.step, (self.home / entry["file"]).read_bytes(), self.training.state
        after = self.listed()
        assert len(after) <= self.keep
        dropped = [name for name in before if name not in after]
        assert not dropped or len(after) == self.keep, "a good one is dropped only to make room"
        assert all(self.written[name][0] < self.written[after[0]][0] for name in dropped)

    def save_best(self, accuracy: float) -> None:
        # A step that is trained again has the accuracy it had.
        accuracy = self.accuracy.setdefault(self.training.step, accuracy)
        digest = self.training.save_best(accuracy)
        if self.best is None or accuracy > self.best[1] or self.training.step == self.best[0]:
            self.best = self.training.step, accuracy
            best = read_or_rebuild_index(self.home)["best"]
            assert weights_sha256(load_file(self.home / best["file"])) == digest
        best = read_or_rebuild_index(self.home)["best"]
        assert (best["step"], best["accuracy"]) == self.best

    def damage(self, which: int, how: tuple[str, float]) -> None:
        # The newest first.
        files = sorted(self.home.glob("*.safetensors"), reverse=True)
        if files:
            damage(files[which % len(files)], *how)

    def restore(self) -> None:
        good = self.good()
        if self.written and not good:
            with pytest.raises(MachineError, match="no good checkpoint is left"):
                Training(self.home, self.keep)
            shutil.rmtree(self.home)
            self.start_again()
            return
        self.training = Training(self.home, self.keep)
        best = read_or_rebuild_index(self.home).get("best")
        if best and intact(self.home, best, print) is None:
            # From before it, if that can be, the best model comes about again.
            good = [name for name in good if self.written[name][0] < best["step"]] or good
        step, _, state = self.written[good[-1]] if good else (0, b"", None)
        assert self.training.step == step
        assert state in (None, self.training.state)

    def look(self) -> None:
        """Nothing is there but the index and what it lists."""
        index = read_or_rebuild_index(self.home)
        steps = [entry["step"] for entry in index["checkpoints"]]
        assert steps == sorted(set(steps))
        best = [index["best"]["file"]] if self.best else []
        present = {path.name for path in self.home.iterdir()} if self.home.exists() else set()
        assert present <= {INDEX, *self.listed(), *best}


OPERATIONS = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 3)),
    st.tuples(st.just("damage"), st.integers(0, 3), DAMAGE),
    st.tuples(st.just("restore")),
    st.tuples(st.just("save_best"), st.sampled_from([0.5, 0.6, 0.7])),
)


@FIXED
@given(st.integers(1, 4), st.lists(OPERATIONS, min_size=12, max_size=30))
def test_the_newest_undamaged_checkpoint_is_restored_whatever_happens_to_the_files(keep: int, operations: list[Any]) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        store = Store(Path(name, "checkpoints"), keep)
        for operation, *values in [*operations, ("restore",)]:
            getattr(store, operation)(*values)
            store.look()


@FIXED
@given(
    keep=st.integers(1, 3),
    saves=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    files=st.dictionaries(st.integers(0, 2), DAMAGE, max_size=3),
    index=DAMAGE,
)
def test_a_damaged_index_costs_no_good_checkpoint(
    keep: int, saves: list[int], files: dict[int, tuple[str, float]], index: tuple[str, float]
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        home = Path(name)
        training = Training(home, keep)
        saved: dict[int, str] = {}
        for draw, steps in enumerate(saves):
            training.save(steps, draw)
            saved[training.step] = training.state
        training.save_best(0.5)
        good = {}
        for position, entry in enumerate(read_or_rebuild_index(home)["checkpoints"]):
            if position in files:
                damage(home / entry["file"], *files[position])
            else:
                good[entry["step"]] = saved[entry["step"]]
        damage(home / INDEX, *index)
        if not good:
            # Where all is gone, nothing tells this run from one that has not begun.
            with pytest.raises(MachineError) if any(home.glob("step-*")) or (home / INDEX).exists() else nullcontext():
                Training(home, keep)
            return
        restored = Training(home, keep)
        assert restored.step == max(good)
        assert restored.state == good[restored.step]
        restored.save(1, 100)
        again = Training(home, keep)
        assert (again.step, again.state) == (restored.step, restored.state)
