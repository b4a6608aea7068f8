"""Steps of the ordered against the native reduction, in turn on the same ranks: `torchrun bench/steps.py MODEL PAIRS SECONDS`."""

import json
import sys
import time

import torch
import torch.distributed as dist

from pipeline import models, parallel, ranks
from pipeline.config import Dist
from pipeline.parallel.lanes import Lanes, Task

BATCH_PER_RANK = 128


def make(group: ranks.Ranks, model_name: str, reduction: str, batch: tuple[torch.Tensor, torch.Tensor], per_rank: int):
    """A function that takes some steps, as the product's loop takes them."""
    torch.manual_seed(1)
    model = models.build(model_name, 1, 28, 10).to(memory_format=torch.channels_last)
    lanes = Lanes([per_rank] * group.size, group.rank, BATCH_PER_RANK * group.size)
    size = BATCH_PER_RANK // per_rank
    bf16 = torch.cpu._is_avx512_bf16_supported()
    task = Task(
        model,
        lambda step, lane: (batch[0][:size], batch[1][:size]),
        seed=1,
        label_smoothing=0.0,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    )
    strategy = parallel.build(task, lanes, group, Dist.model_construct(reduction=reduction))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)

    def take(steps: int) -> float:
        dist.barrier()
        started_at = time.monotonic()
        for step in range(steps):
            strategy.backward(step)
            optimizer.step()
        dist.barrier()
        return steps * BATCH_PER_RANK * group.size / (time.monotonic() - started_at)

    return take


def main() -> None:
    model_name, pairs, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    group = ranks.init_group("cpu", "gloo", ranks.rendezvous(2, 60), 60)
    source = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH_PER_RANK, 1, 28, 28, generator=source).contiguous(memory_format=torch.channels_last)
    batch = images, torch.randint(10, (BATCH_PER_RANK,), generator=source)
    kinds = {"native": ("native", 1), "ordered": ("ordered", 1), "ordered, 2 lanes a rank": ("ordered", 2)}
    takers = {name: make(group, model_name, reduction, batch, lanes) for name, (reduction, lanes) in kinds.items()}
    for take in takers.values():
        take(3)
    # Every rank must take as many steps: rank 0 says how many fill the time.
    one = int.from_bytes(
        group.broadcast_bytes(max(1, round(seconds * takers["native"](3) / BATCH_PER_RANK / group.size)).to_bytes(8, "big")), "big"
    )
    speeds: dict[str, list[float]] = {name: [] for name in kinds}
    for pair in range(pairs):
        names = list(takers) if pair % 2 else list(reversed(takers))
        for name in names:
            speeds[name].append(takers[name](one))
    if group.rank == 0:
        print(json.dumps({"steps": one, "speeds": speeds}))
    ranks.shutdown_group(group)


main()
