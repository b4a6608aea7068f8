"""`dist.lanes_per_rank: auto`: lanes are shared out by the speed that each rank shows at the start."""

import copy
import statistics
import time
from dataclasses import replace

import torch

from pipeline.heartbeat import Heartbeat
from pipeline.parallel.lanes import Lanes, Task
from pipeline.ranks import Ranks

TIMES = 5


def by_speed(lanes: Lanes, task: Task, ranks: Ranks) -> Lanes:
    """The same lanes, shared out so that the slowest rank is done as early as possible; every rank must call it."""
    seconds = torch.tensor([[seconds_of(lanes.own.start, task, ranks.heartbeat)]], dtype=torch.float64, device=ranks.device)
    return replace(lanes, per_rank=shares(lanes.count, ranks.gather_rows(seconds, [1] * ranks.size).flatten().tolist()))


def shares(lanes: int, seconds: list[float]) -> list[int]:
    """How many lanes each rank gets that needs so long for one; at least one each."""
    found = [1] * len(seconds)
    for _ in range(lanes - len(seconds)):
        # Whoever is done first with one more.
        found[min(range(len(seconds)), key=lambda rank: (found[rank] + 1) * seconds[rank])] += 1
    return found


def seconds_of(lane: int, task: Task, heartbeat: Heartbeat, times: int = TIMES) -> float:
    """The median time of forward and backward of one lane, on a copy of the model; the first one is not counted, nor reading it."""
    model, taken = copy.deepcopy(task.model), list[float]()
    images, labels = task.begin(0, lane)
    for _ in range(1 + times):
        heartbeat.computing()
        started_at = time.perf_counter()
        loss, _ = task.loss(model, images, labels)
        loss.backward()
        if loss.is_cuda:
            torch.cuda.synchronize(loss.device)
        taken.append(time.perf_counter() - started_at)
    return statistics.median(taken[1:])
