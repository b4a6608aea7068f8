"""A training with a fault built in: `FAULT=hang:1:30 python -m tests.faulty train …` hangs rank 1 in step 30.

The launcher is the product's, and so are its ranks, but for what one of them does in that step.
"""

import ctypes
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor

from pipeline import __main__ as commands
from pipeline import parallel
from pipeline.launch import torchrun
from pipeline.parallel import Strategy
from pipeline.parallel.lanes import Lanes, Task, Totals
from pipeline.ranks import Ranks
from pipeline.training import rank


class Faulty:
    """A strategy that has a fault in one step, or is slow in each."""

    def __init__(self, strategy: Strategy, kind: str, step: int):
        self._strategy, self._kind, self._step = strategy, kind, step

    def backward(self, step: int) -> Totals:
        if self._kind == "slow":
            time.sleep(0.2)
        elif step == self._step:
            getattr(self, self._kind)()
        return self._strategy.backward(step)

    def hang(self) -> None:
        time.sleep(1000)

    def raising(self) -> None:
        raise RuntimeError("the cable is loose")

    def segfault(self) -> None:
        ctypes.string_at(0)

    def abort(self) -> None:
        os.abort()

    def memory(self) -> None:
        torch.empty(1 << 50)


def main() -> int:
    """The launcher's part: the command line as it is, with this module for its ranks."""
    run = torchrun.run
    torchrun.run = lambda _, *rest: run("tests.faulty", *rest)
    return commands.main()


def as_rank() -> None:
    """A rank's part."""
    kind, number, step = os.environ["FAULT"].split(":")
    build = parallel.build

    def with_fault(name: str, task: Task, lanes: Lanes, group: Ranks, reduction: str) -> Any:
        if group.rank != int(number):
            return build(name, task, lanes, group, reduction)
        if kind == "nan":
            task = Task(task.model, nowhere(task, int(step)), task.seed, task.label_smoothing, task.autocast)
        return Faulty(build(name, task, lanes, group, reduction), kind if kind != "nan" else "", int(step))

    parallel.build = with_fault
    rank.run_as_rank(rank.main)


def nowhere(task: Task, wrong: int) -> Any:
    """The task's batches, with one pixel that is no number in the last own lane of a step."""

    def batch(step: int, lane: int) -> tuple[Tensor, Tensor]:
        images, labels = task.batch(step, lane)
        if step == wrong:
            images[0, 0, 0, 0] = float("nan")
        return images, labels

    return batch


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        as_rank()
    else:
        sys.exit(main())
