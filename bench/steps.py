"""Steps of the ordered against the native reduction, in turn on the same ranks: `torchrun bench/steps.py MODEL PAIRS SECONDS KINDS`."""

import json
import math
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from pipeline import models, parallel, ranks
from pipeline.config import Dist
from pipeline.hardware import machine
from pipeline.hardware.binding import bind_to_cpus
from pipeline.models.cpu_layers import replace_kernels
from pipeline.parallel import lane_groups
from pipeline.parallel.lanes import Lanes, Task
from pipeline.training.memory import keep_freed_memory

BATCH_PER_RANK = 128
# The settings and the lanes a rank.
KINDS: dict[str, dict[str, tuple[dict[str, Any], int]]] = {
    "lanes": {
        "native": ({"reduction": "native"}, 1),
        "ordered": ({}, 1),
        "ordered, 2 lanes a rank": ({}, 2),
        "ordered, 4 lanes a rank": ({}, 4),
    },
    # What is accumulated is computed one lane after another.
    "at once": {
        "native": ({"reduction": "native"}, 1),
        "2 lanes a rank, one after another": ({"accumulation": 2}, 2),
        "2 lanes a rank, at once": ({}, 2),
        "4 lanes a rank, one after another": ({"accumulation": 4}, 4),
        "4 lanes a rank, at once": ({}, 4),
    },
    "algorithms": {
        "native": ({"reduction": "native"}, 1),
        "flat": ({"algorithm": "flat"}, 1),
        "hierarchical, two machines": ({"algorithm": "hierarchical", "nodes": 2}, 1),
        "butterfly": ({"algorithm": "butterfly"}, 1),
    },
}


def batch_of(images: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    drawn = torch.randn(images, 1, 28, 28, generator=source).contiguous(memory_format=torch.channels_last)
    return drawn, torch.randint(10, (images,), generator=source)


def build(
    group: ranks.Ranks, model_name: str, settings: dict[str, Any], batch: tuple[torch.Tensor, torch.Tensor], per_rank: int
) -> tuple[parallel.Strategy, torch.optim.Optimizer]:
    """A strategy and its optimizer, as the product builds them, for the same batch on every rank, in so many lanes."""
    torch.manual_seed(1)
    model = models.build(model_name, 1, 28, 10).to(memory_format=torch.channels_last)
    replace_kernels(model, weights_by_products=settings.get("reduction") != "native")
    images = len(batch[1])
    lanes, size = Lanes([per_rank] * group.size, group.rank, images * group.size), images // per_rank
    bf16 = machine.detect().fast_bf16_on_cpu
    task = Task(
        model,
        lambda step, lane: (batch[0][:size], batch[1][:size]),
        seed=1,
        label_smoothing=0.0,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    )
    strategy = parallel.build(task, lanes, group, Dist.model_construct(**settings))
    # Nothing is learned: a batch that is known by heart has denormal gradients, which take kernels several times as long.
    optimizer = torch.optim.SGD(list(strategy.parameters.values()), lr=0.0, momentum=0.9, weight_decay=5e-4, fused=True)
    strategy.follow(optimizer)
    return strategy, optimizer


def seconds_of(steps: int, strategy: parallel.Strategy, optimizer: torch.optim.Optimizer) -> float:
    """How long some steps take, as the product's loop takes them."""
    dist.barrier()
    started_at = time.monotonic()
    for step in range(steps):
        strategy.backward(step)
        optimizer.step()
    dist.barrier()
    return time.monotonic() - started_at


def main() -> None:
    model_name, pairs, seconds, kinds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), KINDS[sys.argv[4]]
    torch.set_num_threads(1)
    keep_freed_memory()
    if kinds is KINDS["at once"]:
        # However long they are.
        lane_groups.LONG_SECONDS = math.inf
    group = ranks.init_group("cpu", "gloo", ranks.rendezvous(int(os.environ["WORLD_SIZE"]), 60), 60)
    if sys.argv[4] != "algorithms":
        # As the product does, where they take all CPUs; ordered then adds up in shared memory.
        group.bound = bind_to_cpus("cpu", 1, group.all_on_this_machine)
    batch, together = batch_of(BATCH_PER_RANK), BATCH_PER_RANK * group.size
    built = {name: build(group, model_name, settings, batch, lanes) for name, (settings, lanes) in kinds.items()}
    for one in built.values():
        # Until it is known which lanes are computed at once.
        seconds_of(lane_groups.TIMED_STEPS + 2, *one)
    # Every rank must take as many steps: rank 0 says how many fill the time.
    steps = int.from_bytes(group.broadcast_bytes(max(1, round(seconds * 3 / seconds_of(3, *built["native"]))).to_bytes(8, "big")), "big")
    speeds: dict[str, list[float]] = {name: [] for name in kinds}
    for pair in range(pairs):
        for name in list(built) if pair % 2 else list(reversed(built)):
            speeds[name].append(steps * together / seconds_of(steps, *built[name]))
    if group.rank == 0:
        print(json.dumps({"steps": steps, "precision": "bf16" if machine.detect().fast_bf16_on_cpu else "fp32", "speeds": speeds}))
    ranks.shutdown_group(group)


if __name__ == "__main__":
    main()
