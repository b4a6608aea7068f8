"""How long a training waits for a full checkpoint, and `torch.save` with fsync of the same state: `torchrun bench/stall.py ROUNDS`.

The loop checks that the state is finite and copies it, and a thread writes it; so also how much slower a step is meanwhile.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from pipeline import models, ranks
from pipeline.tracking.journal import Journal
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.guard import NonFiniteGuard
from pipeline.training.memory import keep_freed_memory
from pipeline.training.state import State

IMAGES = 8


def seconds_of(thing: Callable[[], object]) -> float:
    started_at = time.monotonic()
    thing()
    return time.monotonic() - started_at


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What people write."""
    with path.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    group = ranks.init_group("cpu", "gloo", ranks.rendezvous(1, 60), 60)
    model = models.build("resnet18", 1, 28, 10).to(memory_format=torch.channels_last)
    # Nothing is learned: these gradients would diverge.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, fused=True)
    images = torch.rand(IMAGES, 1, 28, 28).contiguous(memory_format=torch.channels_last)

    def step() -> None:
        optimizer.zero_grad()
        model(images).sum().backward()
        optimizer.step()

    found: dict[str, list[float]] = {"stall": [], "torch.save + fsync": [], "a step": [], "a step beside the write": []}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, ThreadPoolExecutor(1) as executor:
        path = Path(folder) / "journal.jsonl"
        journal, state = Journal(path), State(model, optimizer)
        checkpoints = Checkpoints(Path(folder) / "checkpoints", 2, group, path, executor)
        guard = NonFiniteGuard(state, group, lambda step: "")
        step()

        def stall(number: int) -> None:
            """What the training loop does for a checkpoint."""
            guard.check(number)
            checkpoints.save(number, state)

        for number in range(int(sys.argv[1])):
            found["a step"].append(seconds_of(step))
            # As after every logged step.
            journal.metrics({"train/loss": 0.0}, number + 1)
            found["stall"].append(seconds_of(partial(stall, number + 1)))
            found["a step beside the write"].append(seconds_of(step))
            checkpoints.finish()
            found["torch.save + fsync"].append(seconds_of(lambda: save(Path(folder) / "latest.pt", model, optimizer)))
    print(json.dumps(found))
    ranks.shutdown_group(group)


if __name__ == "__main__":
    main()
