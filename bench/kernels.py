"""A lane's forward and backward with torch's kernels and with ours on CPUs, in turn, on one thread.

With `--trainings 140` it counts instead how many trainings of two steps in bf16, on images of 16 by 16 pixels, end in other bits than most.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import models
from pipeline.models.cpu_layers import replace_kernels
from pipeline.training.checkpoint_file import weights_sha256
from pipeline.training.memory import keep_freed_memory

MODELS = ["lenet", "resnet18", *(f"torchvision:{name}" for name in ("resnet50", "mobilenet_v3_small", "mobilenet_v2", "efficientnet_b0"))]
SIDE, WARM_STEPS = 28, 2
SMALL_SIDE, IMAGES_OF_SMALL = 16, 6


def made(name: str, replace: bool, side: int = SIDE) -> nn.Module:
    """A model as the product makes it on CPUs, with the same weights each time."""
    torch.manual_seed(1)
    model = models.build(name, 1, side, 10)
    if replace:
        replace_kernels(model)
    return model.to(memory_format=torch.channels_last).train()  # pyright: ignore


def milliseconds(model: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> float:
    """How long a lane takes."""
    started_at = time.perf_counter()
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(images)
    F.cross_entropy(logits.float(), labels, reduction="sum").backward()
    return 1000 * (time.perf_counter() - started_at)


def other_bits(name: str, replace: bool, trainings: int) -> int:
    """How many of so many trainings, all of the same weights and images, end in other bits than most."""
    found: Counter[str] = Counter()
    images = torch.randn(IMAGES_OF_SMALL, 1, SMALL_SIDE, SMALL_SIDE, generator=torch.Generator().manual_seed(2))
    for _ in range(trainings):
        model = made(name, replace, SMALL_SIDE)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(2):
            milliseconds(model, images.contiguous(memory_format=torch.channels_last), torch.arange(IMAGES_OF_SMALL), torch.bfloat16)
            optimizer.step()
        found[weights_sha256(model.state_dict())] += 1
    return trainings - max(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, help="names as in params.yaml")
    parser.add_argument("--images", type=int, default=32, help="of a lane")
    parser.add_argument("--side", type=int, default=SIDE, help="of an image, in pixels")
    parser.add_argument("--pairs", type=int, default=9, help="how often each is measured")
    parser.add_argument("--trainings", type=int, help="count how many of so many end in other bits, instead")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for name in wanted.models if wanted.trainings else []:
        theirs, ours = (other_bits(name, replace, wanted.trainings) for replace in (False, True))
        print(f"{name}, bf16, {wanted.trainings} trainings: {theirs} end in other bits with torch's kernels, {ours} with ours", flush=True)
    if wanted.trainings:
        return
    images = torch.randn(wanted.images, 1, wanted.side, wanted.side).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(wanted.images) % 10
    for name in wanted.models:
        arms = [made(name, replace, wanted.side) for replace in (False, True)]
        for dtype in (torch.bfloat16, torch.float32):
            found: list[list[float]] = [[], []]
            for number in range(WARM_STEPS + wanted.pairs):
                for arm in (0, 1) if number % 2 else (1, 0):
                    found[arm].append(milliseconds(arms[arm], images, labels, dtype))
            before, after = (values[WARM_STEPS:] for values in found)
            gains = [one / other for one, other in zip(before, after, strict=True)]
            medians = " and ".join(f"{statistics.median(one):.1f} ms ({min(one):.1f} to {max(one):.1f})" for one in (before, after))
            gain = f"{statistics.median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})"
            print(f"{name}, {str(dtype)[6:]}: torch's own and ours {medians}, gain {gain}, n = {wanted.pairs}", flush=True)


if __name__ == "__main__":
    main()
