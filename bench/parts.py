"""Where the time of a step goes: the product's ranks, each part of their loop timed: `torchrun bench/parts.py JOB`, on CPUs."""

import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.optim import SGD

from bench.silent import Stopwatch
from pipeline import job as jobs
from pipeline.data.batches import Batches
from pipeline.parallel.ddp import Ddp
from pipeline.parallel.lane_buffers import LaneBuffers
from pipeline.parallel.lanes import Task
from pipeline.parallel.ordered import LaneGradients
from pipeline.training import train_rank
from pipeline.training.guard import NonFiniteGuard
from pipeline.training.stopping import Stop

# Calls within others: their time is theirs alone. What is left of a strategy's own time is autograd's.
PARTS: list[tuple[str, Any, str]] = [
    ("data", Batches, "lane"),
    ("forward", Task, "loss"),
    ("forward", Task, "losses"),
    ("backward", Ddp, "backward"),
    ("reduction", LaneGradients, "hook"),
    ("reduction", LaneGradients, "keep"),
    ("reduction", LaneBuffers, "finish"),
    ("guard", NonFiniteGuard, "observe"),
    ("optimizer", SGD, "step"),
    ("asking to stop", Stop, "agreed"),
]
WARM_STEPS = 3


class Clock:
    """Adds up the seconds of every part, less those of the parts that are called within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps, self._started_at, self._within = 0, 0.0, [0.0]

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        # DDP reads a hook's signature.
        @functools.wraps(call)
        def measured(*words: Any, **options: Any) -> Any:
            self._within.append(0.0)
            started_at = time.perf_counter()
            try:
                return call(*words, **options)
            finally:
                elapsed_seconds = time.perf_counter() - started_at
                self.seconds[name] += elapsed_seconds - self._within.pop()
                self._within[-1] += elapsed_seconds
                if name == "optimizer":
                    self._step_done()

        return measured

    def _step_done(self) -> None:
        self.steps += 1
        if self.steps == WARM_STEPS:
            self.seconds.clear()
            self._started_at = time.perf_counter()

    def shares(self) -> dict[str, float]:
        """Every part's share of the time after the first steps."""
        total = time.perf_counter() - self._started_at
        found = {name: seconds / total for name, seconds in self.seconds.items()}
        return found | {"the rest": 1 - sum(found.values())}


class Once(Stopwatch):
    """Keeps the shares at the last log line before the first validation."""

    def __init__(self, clock: Clock):
        super().__init__()
        self._clock, self._validated, self.shares = clock, False, dict[str, float]()

    def metrics(self, values: dict[str, float], step: int) -> None:
        self._validated |= "validation/accuracy" in values
        if "train/images_per_second" in values and self._clock.steps > WARM_STEPS and not self._validated:
            self.shares = self._clock.shares()


def main() -> None:
    job, clock = jobs.read(Path(sys.argv[1])), Clock()
    for name, owner, method in PARTS:
        setattr(owner, method, clock.timed(name, getattr(owner, method)))
    journal = Once(clock)
    # Checkpoints are written beside the training, as the product writes them.
    with train_rank.joined(job) as group, ThreadPoolExecutor(1) as executor:
        train_rank.keep_freed_memory()
        train_rank.train(job, group, journal, executor)
        if group.rank == 0:
            print(json.dumps(journal.shares))


if __name__ == "__main__":
    main()
