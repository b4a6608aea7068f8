"""The product's ranks without journal and mirror, as one torchrun job: `torchrun bench/silent.py JOB`."""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from pipeline import job as jobs
from pipeline.tracking.journal import Silent
from pipeline.training import train_rank
from pipeline.training.memory import keep_freed_memory


class Stopwatch(Silent):
    """Keeps the speeds in memory."""

    def __init__(self) -> None:
        self.speeds: list[dict[str, float]] = []

    def metrics(self, values: dict[str, float], step: int) -> None:
        if "train/images_per_second" in values:
            self.speeds.append(values)


def main() -> None:
    job = jobs.read(Path(sys.argv[1]))
    # Checkpoints are written beside the training here too.
    keep_freed_memory()
    with train_rank.joined(job) as group, ThreadPoolExecutor(1) as executor:
        stopwatch = Stopwatch()
        train_rank.train(job, group, stopwatch, executor)
        if group.rank == 0:
            print(mean_speed(stopwatch.speeds))


def mean_speed(lines: list[dict[str, float]]) -> float:
    """Images a second over all log lines but the first two, validation left out."""
    images = [one["train/samples"] - before["train/samples"] for before, one in pairwise(lines[1:])]
    seconds = [count / line["train/images_per_second"] for count, line in zip(images, lines[2:], strict=True)]
    return sum(images) / sum(seconds)


if __name__ == "__main__":
    main()
