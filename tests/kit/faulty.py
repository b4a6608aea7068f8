"""A training with a fault built in: `FAULT=hang:1:30 python -m tests.kit.faulty train …` hangs rank 1 in step 30; `full:0:0` a disk.

The launcher is the product's, and so are its ranks, but for what one of them does in that step.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline import __main__ as commands
from pipeline.data.batches import Batches
from pipeline.launch import supervisor, watchdog
from pipeline.training import train_rank, work
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.evaluation import Evaluation

# How long a write of these small checkpoints takes, at most.
WRITTEN_SECONDS = 0.5


class Fault:
    """A rank's batches, with a fault in the first one of a step, or in every one where it is slow."""

    def __init__(self, batches: Batches, kind: str, step: int):
        self._batches, self._kind, self._step = batches, kind, step

    def lane(self, step: int, lane: int) -> tuple[Tensor, Tensor]:
        images, labels = self._batches.lane(step, lane)
        if self._kind == "slow":
            time.sleep(0.1)
        elif step == self._step:
            # A checkpoint that rank 0 is writing beside the training is one that tests ask for.
            time.sleep(WRITTEN_SECONDS)
            getattr(self, self._kind)(images)
        return images, labels

    def hang(self, _: Tensor) -> None:
        time.sleep(1000)

    def raising(self, _: Tensor) -> None:
        raise RuntimeError("the cable is loose")

    def segfault(self, _: Tensor) -> None:
        ctypes.string_at(0)

    def abort(self, _: Tensor) -> None:
        os.abort()

    def killed(self, _: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def memory(self, _: Tensor) -> None:
        torch.empty(1 << 50)

    def short(self, _: Tensor) -> None:
        # As the allocator of a GPU counts an allocation that failed, also one that cuDNN then did without.
        torch.cuda.memory_stats = lambda *_: {"num_ooms": 1}

    def nan(self, images: Tensor) -> None:
        images[0, 0, 0, 0] = float("nan")

    def infinity(self, images: Tensor) -> None:
        images[0, 0, 0, 0] = float("inf")


def slow_chunks(evaluation: Evaluation, seconds: float) -> Evaluation:
    """An evaluation that takes its time."""
    logits = evaluation._logits

    def slowly(*parts: Any) -> Tensor:
        time.sleep(seconds)
        return logits(*parts)

    evaluation._logits = slowly
    return evaluation


class SlowDisk(Checkpoints):
    """Checkpoints that each take 15 seconds to write."""

    def _write(self, *parts: Any) -> None:
        time.sleep(15)
        super()._write(*parts)


def fill(folder: Path) -> Path:
    """Leave no byte on a disk."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return filler


def main() -> int:
    """The launcher's part: the command line as it is, with this module for its ranks."""
    # A slow rank is told after this long: no test has to wait for half a minute of them.
    watchdog.SLOW_SECONDS = 4
    run = supervisor.run
    supervisor.run = lambda _, *rest: run("tests.kit.faulty", *rest)
    return commands.main()


def as_rank() -> None:
    """A rank's part."""
    kind, number, step = os.environ["FAULT"].split(":")
    if kind == "full":
        export = train_rank.export
        train_rank.export = lambda job: (fill(job.run), export(job))
    elif kind == "disk":
        work.Checkpoints = SlowDisk
    elif kind == "validation":
        build = work.Evaluation
        work.Evaluation = lambda *parts: slow_chunks(build(*parts), float(number))
    elif os.environ["RANK"] == number:
        batches = work.batches
        work.batches = lambda *parts: Fault(batches(*parts), kind, int(step))
    train_rank.run_as_rank(train_rank.main)


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        as_rank()
    else:
        sys.exit(main())
