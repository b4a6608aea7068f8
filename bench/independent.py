"""What the arithmetic alone allows: processes that know nothing of each other compute a rank's lanes and updates each.

No network, no reader, no tracking: `python bench/independent.py JOB STEPS`, on a prepared experiment's images, which stand ready.
With `--plain` they compute as torch does by itself: a rank's part of a batch at once, in torch's memory order, in fp32.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from torch import multiprocessing as processes

from pipeline import job as jobs
from pipeline import models
from pipeline.data import store
from pipeline.data.batches import Pixels
from pipeline.data.order import HOST, Order
from pipeline.data.store import Manifest
from pipeline.job import Job
from pipeline.parallel.lanes import Task, scaled
from pipeline.training import schedule, train_rank, work
from pipeline.training.memory import keep_freed_memory

WARM_STEPS = 3
Lane = tuple[Tensor, Tensor]


def compute(number: int, job: Job, steps: int, plain: bool, together: Any) -> None:
    """What rank `number` computes in so many steps."""
    config = job.config
    if plain:
        torch.set_num_threads(config.dist.threads_per_rank)
    else:
        train_rank.fix_bits(config.dist.threads_per_rank)
        keep_freed_memory()
    manifest = store.read_manifest(job.prepared)
    channels, side, _ = manifest.shape
    built = models.build(config.model.name, channels, side, manifest.num_classes) if plain else work.build_model(job, manifest, HOST)
    model = built.train()
    first = sum(config.dist.pieces_per_rank[:number])
    own = range(first, first + config.dist.pieces_per_rank[number])
    ready = read(job, manifest, range(WARM_STEPS + steps), own)
    if plain:
        ready = {(step, 0): at_once([ready[step, lane] for lane in own]) for step in range(WARM_STEPS + steps)}
        own = range(1)
    dtype = None if plain else schedule.autocast_dtype(job.precision)
    task = Task(
        model,
        lambda step, lane: ready[step, lane],
        config.seed,
        config.train.label_smoothing,
        partial(torch.autocast, "cpu", dtype, enabled=dtype is not None),
    )
    optimizer = schedule.optimizer(config.train, list(model.parameters()))
    for step in range(WARM_STEPS + steps):
        if step == WARM_STEPS:
            together.wait()
        optimizer.zero_grad()
        for lane in own:
            loss, _ = task.forward(model, step, lane)
            scaled(loss, 1 / config.dist.images_per_step).backward()
        optimizer.step()
    together.wait()


def read(job: Job, manifest: Manifest, steps: range, lanes: range) -> dict[tuple[int, int], Lane]:
    """The images and labels of these lanes in these steps, as a rank reads them."""
    config, split = job.config, store.open_split(job.prepared, "train")
    order = Order(config.seed, len(split.labels), config.dist.images_per_step, config.dist.pieces)
    reader = work.batches(job, split, Pixels(manifest.mean, manifest.std, HOST), order, True, manifest)
    return {(step, lane): reader.lane(step, lane) for step in steps for lane in lanes}


def at_once(lanes: list[Lane]) -> Lane:
    """Several lanes as one batch, in torch's memory order."""
    images, labels = zip(*lanes, strict=True)
    return torch.cat(images).contiguous(memory_format=torch.contiguous_format), torch.cat(labels)


def main() -> None:
    job, steps, plain = jobs.read(Path(sys.argv[1])), int(sys.argv[2]), "--plain" in sys.argv
    context, size = processes.get_context("spawn"), job.config.dist.world_size
    together = context.Barrier(size + 1)
    ranks = processes.start_processes(compute, (job, steps, plain, together), size, join=False, start_method="spawn")
    try:
        together.wait(120)
        started_at = time.monotonic()
        together.wait()
    except BrokenBarrierError:
        sys.exit("a process has failed")
    seconds = time.monotonic() - started_at
    ranks.join()
    print(json.dumps({"images_per_second": steps * job.config.dist.images_per_step / seconds}))


if __name__ == "__main__":
    main()
