"""Steps of the product, or of hand-written loops, which compute as torch does by itself: `torchrun bench/gpu_steps.py MODEL SIDE SECONDS`.

The images have Fashion-MNIST's number and shape and lie in the device's memory, except in `examples`, the loop of PyTorch's examples.
"""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from pipeline import models, parallel, ranks
from pipeline.config import Dist
from pipeline.data import Split, augment
from pipeline.data.batches import Batches, Pixels
from pipeline.data.order import Order
from pipeline.hardware import machine
from pipeline.parallel.lanes import Lanes, Task
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.evaluation import Evaluation
from pipeline.training.guard import NonFiniteGuard
from pipeline.training.memory import keep_freed_memory
from pipeline.training.state import State
from pipeline.training.stopping import Stop
from pipeline.training.train_rank import fix_bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLASSES = 10
# On a CPU only to see that it runs.
BATCH, IMAGES, VALIDATED = (256, 60_000, 6000) if DEVICE.type == "cuda" else (32, 2000, 250)
ARMS = {
    "ordered, 1 lane": ("ddp", "ordered", 1),
    "ordered, 4 lanes": ("ddp", "ordered", 4),
    "native": ("ddp", "native", 1),
    "graphs, 1 lane": ("graphs", "ordered", 1),
    "graphs, 4 lanes": ("graphs", "ordered", 4),
}
Step = Callable[[], None]
# On an old CPU a step of ResNet-18 takes a minute in bf16.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" or machine.detect().fast_bf16_on_cpu else None


def autocast() -> torch.autocast:
    return torch.autocast(DEVICE.type, DTYPE, enabled=DTYPE is not None)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def make_model(name: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return models.build(name, 1, 28, CLASSES).to(device=DEVICE, memory_format=torch.channels_last)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)


def product(model_name: str, split: Split, group: ranks.Ranks, arm: tuple[str, str, int]) -> Step:
    """A step as the product's loop takes it."""
    strategy, reduction, count = arm
    model, lanes = make_model(model_name).train(), Lanes([count], 0, BATCH)
    order = Order(1, len(split.labels), BATCH, count)
    batches = Batches(split, order, augment.build("none", 1, len(split.labels), [0.3]), Pixels([0.3], [0.35], DEVICE), hold=True)
    task = Task(model, batches.lane, 1, 0.0, autocast)
    built, optimizer = (
        parallel.build(task, lanes, group, Dist.model_construct(strategy=strategy, reduction=reduction)),
        make_optimizer(model),
    )
    guard, stop, step = NonFiniteGuard(State(model, optimizer, built), group, lambda step: ""), Stop(group, 60), 0

    def take() -> None:
        nonlocal step
        stop.agreed()
        built.backward(step)
        guard.observe()
        optimizer.step()
        step += 1

    return take


def by_hand(model_name: str, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> Step:
    """A step of a hand-written DDP loop."""
    model = make_model(model_name).train()
    ddp, optimizer = DistributedDataParallel(model, gradient_as_bucket_view=True), make_optimizer(model)

    def take() -> None:
        images, labels = next(batches)
        with autocast():
            logits = ddp(images)
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return take


def in_memory(split: Split) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches gathered on the device."""
    images, labels = torch.from_numpy(split.images).to(DEVICE), torch.from_numpy(split.labels).to(DEVICE)
    while True:
        for rows in torch.randperm(len(labels)).to(DEVICE).split(BATCH):
            if len(rows) == BATCH:
                pixels = (images[rows].float() / 255 - 0.3) / 0.35
                yield pixels.contiguous(memory_format=torch.channels_last), labels[rows]


class Images(Dataset[Any]):
    """One image after another, as torchvision's data sets with `ToTensor` and `Normalize` give them."""

    def __init__(self, split: Split):
        self._split = split

    def __len__(self) -> int:
        return len(self._split.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.from_numpy(self._split.images[index]).float().div(255)
        return (image - 0.3) / 0.35, int(self._split.labels[index])


def loaded(split: Split) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of a DataLoader, as in PyTorch's examples."""
    workers = min(4, os.cpu_count() or 1)
    loader: DataLoader[Any] = DataLoader(
        Images(split), BATCH, shuffle=True, num_workers=workers, pin_memory=DEVICE.type == "cuda", drop_last=True
    )
    while True:
        for images, labels in loader:
            yield images.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)


def speed(take: Step, steps: int) -> float:
    """Images per second."""
    synchronize()
    started_at = time.monotonic()
    for _ in range(steps):
        take()
    synchronize()
    return steps * BATCH / (time.monotonic() - started_at)


def launches(take: Step) -> dict[str, float]:
    """Kernels launched in a step, or operations where there is no GPU, and the share of time that the device computes."""
    gpu = DEVICE.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiler:
        synchronize()
        started_at = time.monotonic()
        for _ in range(5):
            take()
        synchronize()
        seconds = time.monotonic() - started_at
    events = profiler.events()
    names = [event.name for event in events]
    if not gpu:
        return {"operations": sum(name.startswith("aten::") for name in names) / 5}
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    return {"launches": sum("Launch" in name for name in names) / 5, "busy under the profiler": busy / seconds}


def stalls(model_name: str, split: Split, group: ranks.Ranks) -> dict[str, float]:
    """Milliseconds of a validation of 6,000 images (on a CPU, fewer) and of a checkpoint; the second of each."""
    model = make_model(model_name)
    optimizer = make_optimizer(model)
    evaluation = Evaluation(
        Split(split.images[:VALIDATED], split.labels[:VALIDATED]), Pixels([0.3], [0.35], DEVICE), CLASSES, group, hold=True
    )
    found: dict[str, float] = {}
    # Its momentum is half of a checkpoint.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), 2, group, executor=ThreadPoolExecutor(1))
        for step in (1, 2):
            synchronize()
            started_at = time.monotonic()
            evaluation(model, DTYPE)
            validated_at = time.monotonic()
            checkpoints.save(step, State(model, optimizer))
            found = {"validation": 1e3 * (validated_at - started_at), "checkpoint": 1e3 * (time.monotonic() - validated_at)}
            checkpoints.finish()
    return found


def main() -> None:
    model_name, side, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    if side == "product":
        fix_bits(1)
        keep_freed_memory()
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    group = ranks.init_group(DEVICE.type, backend, ranks.rendezvous(1, 60), 60)
    source = np.random.default_rng(0)
    split = Split(source.integers(0, 256, (IMAGES, 1, 28, 28), dtype=np.uint8), source.integers(0, CLASSES, IMAGES))
    if side == "product":
        takers = {name: product(model_name, split, group, arm) for name, arm in ARMS.items()}
    else:
        takers = {"by hand": by_hand(model_name, in_memory(split)), "examples": by_hand(model_name, loaded(split))}
    found: dict[str, Any] = {"images_per_second": {}, "launches": {}}
    for name, take in takers.items():
        speed(take, 5)
        found["images_per_second"][name] = speed(take, max(3, round(seconds * speed(take, 5) / BATCH)))
        if name != "examples":
            found["launches"][name] = launches(take)
    found["peak host memory, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if DEVICE.type == "cuda":
        found["peak device memory of all these models, MiB"] = torch.cuda.max_memory_allocated() / 2**20
    if side == "product":
        found["stalls, ms"] = stalls(model_name, split, group)
    print(json.dumps(found))
    dist.destroy_process_group()


main()
