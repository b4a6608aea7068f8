"""What each strategy holds, sends and computes: one of them, on the ranks of `torchrun bench/strategies.py WAY SECONDS`."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pipeline import models, parallel, ranks
from pipeline.config import Dist
from pipeline.parallel.lanes import Lanes, Task

BATCH, LANES, MIB = 64, 4, 2**20
WAYS: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce"},
    "allreduce, naive": {"strategy": "allreduce", "algorithm": "naive"},
    "dataparallel": {"strategy": "dataparallel"},
    "ddp": {},
    "ddp, native": {"reduction": "native"},
    "graphs": {"strategy": "graphs"},
    "fsdp": {"strategy": "fsdp"},
    "pipeline, 1F1B": {"strategy": "pipeline"},
    "pipeline, GPipe": {"strategy": "pipeline", "algorithm": "gpipe"},
    "tensor, native": {"strategy": "tensor", "reduction": "native"},
}


def resident(field: str) -> int:
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index(f"{field}:") + 1]) * 1024


def held(strategy: parallel.Strategy, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and momenta."""
    found = 0
    for one in strategy.parameters.values():
        for value in (one, one.grad, *optimizer.state[one].values()):
            if isinstance(value, torch.Tensor):
                found += (value.to_local() if isinstance(value, DTensor) else value).nbytes
    return found


def build(group: ranks.Ranks, settings: dict[str, Any]) -> tuple[parallel.Strategy, torch.optim.Optimizer]:
    source = torch.Generator().manual_seed(0)
    size = BATCH // LANES
    images = torch.randn(size, 1, 28, 28, generator=source).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (size,), generator=source)
    torch.manual_seed(1)
    model = models.build("resnet18", 1, 28, 10).to(memory_format=torch.channels_last)
    lanes = Lanes([LANES // group.size] * group.size, group.rank, BATCH)
    task = Task(
        model,
        lambda step, lane: (images, labels),
        seed=1,
        label_smoothing=0.0,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()),
    )
    strategy = parallel.build(task, lanes, group, Dist.model_construct(**settings))
    optimizer = torch.optim.SGD(list(strategy.parameters.values()), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    strategy.follow(optimizer)
    return strategy, optimizer


def measure(group: ranks.Ranks, settings: dict[str, Any], seconds: float) -> dict[str, float]:
    # From here on: the most that this process has resident.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    strategy, optimizer = build(group, settings)

    def take(steps: int) -> float:
        dist.barrier()
        started_at = time.monotonic()
        for step in range(steps):
            strategy.backward(step)
            optimizer.step()
        dist.barrier()
        return time.monotonic() - started_at

    take(2)
    # Every rank must take as many steps.
    steps = torch.tensor(max(2, round(seconds / take(1))))
    dist.broadcast(steps, 0)
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    took = take(int(steps))
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - sent
    most = torch.tensor([held(strategy, optimizer), resident("VmHWM") - before], dtype=torch.float64) / MIB
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {
        "images/s": int(steps) * BATCH / took,
        "MiB sent by a rank in a step": sent / MIB / int(steps) / group.size,
        "MiB of weights, gradients, momenta": float(most[0]),
        "MiB above the start, at most": float(most[1]),
    }


def main() -> None:
    torch.set_num_threads(1)
    group = ranks.init_group("cpu", "gloo", ranks.rendezvous(int(os.environ["WORLD_SIZE"]), 60), 60)
    found = measure(group, WAYS[sys.argv[1]], float(sys.argv[2]))
    if group.rank == 0:
        print(json.dumps(found))
    ranks.shutdown_group(group)


if __name__ == "__main__":
    main()
