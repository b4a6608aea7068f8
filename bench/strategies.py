"""What each strategy holds, sends and computes: one of them, on the ranks of `torchrun bench/strategies.py WAY SECONDS`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bench.steps import batch_of, build, seconds_of
from pipeline import parallel, ranks
from pipeline.training.memory import keep_freed_memory

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


def measure(group: ranks.Ranks, settings: dict[str, Any], seconds: float) -> dict[str, float]:
    # From here on: the most that this process has resident.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    built = build(group, "resnet18", settings, batch_of(BATCH // group.size), LANES // group.size)
    seconds_of(2, *built)
    # Every rank must take as many steps.
    steps = torch.tensor(max(2, round(seconds / seconds_of(1, *built))))
    dist.broadcast(steps, 0)
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    took = seconds_of(int(steps), *built)
    sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - sent
    most = torch.tensor([held(*built), resident("VmHWM") - before], dtype=torch.float64) / MIB
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {
        "images/s": int(steps) * BATCH / took,
        "MiB sent by a rank in a step": sent / MIB / int(steps) / group.size,
        "MiB of weights, gradients, momenta": float(most[0]),
        "MiB above the start, at most": float(most[1]),
    }


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    group = ranks.init_group("cpu", "gloo", ranks.rendezvous(int(os.environ["WORLD_SIZE"]), 60), 60)
    found = measure(group, WAYS[sys.argv[1]], float(sys.argv[2]))
    if group.rank == 0:
        print(json.dumps(found))
    ranks.shutdown_group(group)


if __name__ == "__main__":
    main()
