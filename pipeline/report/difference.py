"""One training against its repetition, bit for bit: which figures and tensors they share, and where they first differ."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.tracking.journal import metrics_by_step

LEARNED = ("train/", "validation/")
# Of the machine, and not of what was learned.
SPEED = "train/images_per_second"
Figures = dict[int, dict[str, float]]


@dataclass(frozen=True)
class Difference:
    """The first value that is another one; with the two values, or the tensor's name."""

    step: int
    text: str


def learned(journal: Path) -> Figures:
    """Return what a journal says of learning at every step."""
    steps = metrics_by_step(journal) if journal.exists() else {}
    kept = {
        step: {name: value for name, value in values.items() if name.startswith(LEARNED) and name != SPEED}
        for step, values in steps.items()
    }
    return {step: values for step, values in kept.items() if values}


def shared(there: Figures, after: int, until: int) -> int:
    """Return how many figures there are to compare in the steps behind `after` up to `until`."""
    return sum(len(values) for step, values in there.items() if after < step <= until)


def in_figures(there: Figures, here: Figures, after: int, until: int) -> Difference | None:
    """Return the first figure that differs; losses are told as hexadecimal floats, which have every bit."""
    for step in sorted(step for step in there if after < step <= until):
        for name, value in there[step].items():
            other = here.get(step, {}).get(name)
            if other is None:
                return Difference(step, f"{name}: {float(value).hex()} there, none here")
            if float(other).hex() != float(value).hex():
                return Difference(step, f"{name}: {float(value).hex()} there, {float(other).hex()} here")
    return None


def checkpoints(there: Path, here: Path, after: int, until: int) -> list[tuple[int, Path, Path]]:
    """Return step and files of every checkpoint that both folders have, the first one first."""
    both = ((int(path.stem.partition("-")[2]), path, here / path.name) for path in sorted(there.glob("step-*.safetensors")))
    return [one for one in both if after < one[0] <= until and one[2].is_file()]


def in_tensors(pairs: list[tuple[int, Path, Path]]) -> Difference | None:
    """Return the first tensor that differs, in the first checkpoint that does."""
    for step, there, here in pairs:
        mine, other = _tensors(there), _tensors(here)
        differing = sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))
        if differing:
            more = f" and {len(differing) - 1} more of {len(mine)}" if len(differing) > 1 else ""
            return Difference(step, f"tensor {differing[0]}{more}")
    return None


def _tensors(path: Path) -> dict[str, Any]:
    """Return type, shape and digest of every tensor in a safetensors file; one is held at a time, and torch is not needed."""
    found: dict[str, Any] = {}
    with path.open("rb") as file:
        size_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size_bytes))
        for name, layout in header.items():
            if name == "__metadata__":
                continue
            begin, end = layout["data_offsets"]
            file.seek(8 + size_bytes + begin)
            found[name] = (layout["dtype"], layout["shape"], hashlib.sha256(file.read(end - begin)).hexdigest())
    return found
