"""A training with a fault built in: `FAULT=hang:1:30 python -m tests.faulty train …` hangs rank 1 in step 30.

The launcher is the product's, and so are its ranks, but for what one of them does in that step.
"""

import ctypes
import os
import sys
import time
from dataclasses import replace

import torch
from torch import Tensor

from pipeline import __main__ as commands
from pipeline import parallel
from pipeline.launch import torchrun
from pipeline.parallel import Strategy
from pipeline.parallel.lanes import Lanes, Task
from pipeline.ranks import Ranks
from pipeline.training import rank


class Fault:
    """A rank's batches, with a fault in the first one of a step, or in every one where it is slow."""

    def __init__(self, task: Task, kind: str, step: int):
        self._batch, self._kind, self._step = task.batch, kind, step

    def __call__(self, step: int, lane: int) -> tuple[Tensor, Tensor]:
        images, labels = self._batch(step, lane)
        if self._kind == "slow":
            time.sleep(0.1)
        elif step == self._step:
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

    def memory(self, _: Tensor) -> None:
        torch.empty(1 << 50)

    def nan(self, images: Tensor) -> None:
        images[0, 0, 0, 0] = float("nan")


def main() -> int:
    """The launcher's part: the command line as it is, with this module for its ranks."""
    run = torchrun.run
    torchrun.run = lambda _, *rest: run("tests.faulty", *rest)
    return commands.main()


def as_rank() -> None:
    """A rank's part."""
    kind, number, step = os.environ["FAULT"].split(":")
    build = parallel.build

    def with_fault(name: str, task: Task, lanes: Lanes, group: Ranks, reduction: str) -> Strategy:
        if group.rank == int(number):
            task = replace(task, batch=Fault(task, kind, int(step)))
        return build(name, task, lanes, group, reduction)

    parallel.build = with_fault
    rank.run_as_rank(rank.main)


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        as_rank()
    else:
        sys.exit(main())
