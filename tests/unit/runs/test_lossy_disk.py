"""A power cut in the middle of a training, on a disk that keeps only what was synced: every state it could leave goes on to the same end."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.kit.lossy_disk import CrashState, Recording
from tests.kit.lossy_training import train

# In memory: nothing here rests on the disk below.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def figures(run: Path) -> list[Any]:
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_bytes().splitlines()]
    return [
        (line["step"], name, value)
        for line in lines
        if line["kind"] == "metrics"
        for name, value in line["values"].items()
        if "per_second" not in name
    ]


def best(run: Path) -> tuple[int, float]:
    found = json.loads((run / "checkpoints" / "index.json").read_bytes())["best"]
    return found["step"], found["accuracy"]


class Unhurt:
    """The same training left alone, and the crash states of its disk."""

    def __init__(self, folder: Path, keep: int, **disk: Any):
        self.keep = keep
        root = folder / "unhurt"
        root.mkdir()
        with Recording(root, **disk) as recording:
            self.states = train(root / "runs" / "one", keep, saved=recording.note).states
        self.figures, self.best = figures(root / "runs" / "one"), best(root / "runs" / "one")
        self.crash_states = recording.crash_states()

    def fault(self, state: CrashState, folder: Path) -> str | None:
        """What is wrong with going on from a crash state, or None."""
        state.write_to(folder)
        run = folder / "runs" / "one"
        try:
            found = train(run, self.keep)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if found.restored < state.note:
            return f"went on from step {found.restored}, though the save of step {state.note} had returned"
        if found.restored and any(self.states[step] != digest for step, digest in found.states.items()):
            return "other weights"
        if figures(run) != self.figures:
            return "figures are missing or there twice"
        return None if best(run) == self.best else "another best model"


def faults(unhurt: Unhurt) -> list[str]:
    found = []
    for state in unhurt.crash_states:
        with tempfile.TemporaryDirectory(dir=MEMORY) as name:
            fault = unhurt.fault(state, Path(name))
            if fault:
                found.append(f"{fault} {[(path, content and len(content)) for path, content in sorted(state.tree, key=str)]}")
    return found


@pytest.mark.parametrize("keep", [1, 2])
def test_a_training_survives_every_state_that_a_power_cut_can_leave(keep: int, record_property) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        unhurt = Unhurt(Path(name), keep)
        found = faults(unhurt)
        print(len(unhurt.crash_states), len(found))
        assert not found, "\n".join(found[:20])
