"""What images of one's own cost: preparing 20,000 JPEGs, reading them while training, and starting on many of them."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from operator import truediv
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import yaml
from torch.nn import functional as F
from torch.utils.data import DataLoader

from bench import starts
from bench.made_images import make, packed
from pipeline import models
from pipeline.data import Split, augment, store
from pipeline.data.batches import Batches, Pixels
from pipeline.data.order import Order
from pipeline.training import train_rank

ROOT = Path(__file__).parents[1]
DECODER = """
import sys
from pathlib import Path
from pipeline.data.decoding import decode
assert not any(isinstance(decode(Path(name), int(sys.argv[1])), str) for name in sys.argv[2:])
"""
COUNT, SIDE, LANE, CPU = 20_000, 32, 128, torch.device("cpu")
TAUGHT = "ImageFolder, DataLoader(2)"


class Peak(threading.Thread):
    """The most memory that a process and all below it hold together, shared pages divided among those that share them."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.bytes, self._process = 0, psutil.Process(pid)
        self.start()

    def run(self) -> None:
        """Look often, until it has ended."""
        while self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
            total = 0
            for one in [self._process, *self._process.children(recursive=True)]:
                try:
                    total += one.memory_full_info().pss
                except psutil.Error:
                    continue
            self.bytes = max(self.bytes, total)
            time.sleep(0.2)


def prepared(folder: Path, images: Path, cpus: str, **changes: Any) -> tuple[float, int, store.Manifest]:
    """Prepare on these CPUs; returns the seconds, the peak of memory and the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"data": {"name": "imagefolder", "root": str(images), "image_size": SIDE} | changes}
    (folder / "params.yaml").write_text(yaml.safe_dump(values))
    words = ["taskset", "-c", cpus, sys.executable, "-m", "pipeline", "prepare", "--params", str(folder / "params.yaml")]
    started_at = time.monotonic()
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    peak = Peak(process.pid)
    assert process.wait() == 0
    elapsed_seconds = time.monotonic() - started_at
    peak.join()
    return elapsed_seconds, peak.bytes, store.read_manifest(folder / "data" / "prepared")


def independent(images: Path, count: int) -> float:
    """Seconds in which so many processes decode all images, each its part, and keep nothing."""
    paths = sorted(images.rglob("*.jpg"))
    words = [sys.executable, "-c", DECODER, str(SIDE)]
    started_at = time.monotonic()
    processes = [subprocess.Popen([*words, *map(str, paths[part::count])], cwd=ROOT) for part in range(count)]
    assert not any(one.wait() for one in processes)
    return time.monotonic() - started_at


def preparing(images: Path, scratch: Path, pairs: int) -> dict[str, list[float]]:
    """Prepare and two independent decoders in turn; every prepare ends in the same digest."""
    found: dict[str, list[float]] = {"prepare, 2 cores": [], "2 independent decoders": [], "peak MiB": []}
    digests: set[str] = set()
    for _ in range(pairs):
        seconds, peak, manifest = prepared(scratch / "both", images, "0,1")
        found["prepare, 2 cores"].append(seconds)
        found["peak MiB"].append(peak / 2**20)
        digests.add(manifest.digest)
        found["2 independent decoders"].append(independent(images, 2))
    seconds, _, manifest = prepared(scratch / "one", images, "0")
    found["prepare, 1 core"] = [seconds]
    assert digests == {manifest.digest}
    return found


def lanes_of(split: Split, manifest: store.Manifest, hold: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Lane after lane, as a rank reads them."""
    order = Order(1, len(split.labels), LANE, 1)
    pixels = Pixels(manifest.mean, manifest.std, CPU)
    batches = Batches(split, order, augment.build("crop-flip", 1, len(split.labels), manifest.mean), pixels, hold)
    return (batches.lane(step, 0) for step in range(10**9))


def as_taught(images: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """torchvision's ImageFolder and a DataLoader with two workers: every image decoded, cut, resized and augmented by itself."""
    from torchvision import datasets, transforms

    steps = [
        transforms.Resize(SIDE),
        transforms.CenterCrop(SIDE),
        transforms.RandomCrop(SIDE, padding=4),
        transforms.RandomHorizontalFlip(),
    ]
    whole = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.25] * 3)])
    loader = DataLoader(datasets.ImageFolder(str(images), whole), LANE, shuffle=True, num_workers=2, persistent_workers=True)
    while True:
        yield from loader


def reading(images: Path, scratch: Path, pairs: int, seconds: float) -> dict[str, list[float]]:
    """Images a second: read alone, and read to train a small model and LeNet on; in turn."""
    torch.set_num_threads(1)
    splits: dict[str, Split] = {}
    for kept in ("pixels", "originals"):
        *_, manifest = prepared(scratch / kept, images, "0,1", store=kept)
        splits[kept] = store.open_split(scratch / kept / "data" / "prepared", "train")
    memory = Split(np.array(splits["pixels"].images), np.array(splits["pixels"].labels))
    ways = {
        "in memory": lanes_of(memory, manifest, True),
        "mapped": lanes_of(splits["pixels"], manifest, True),
        "mapped, read ahead": lanes_of(splits["pixels"], manifest, False),
        "originals": lanes_of(splits["originals"], manifest, False),
        TAUGHT: as_taught(images),
    }
    found: dict[str, list[float]] = {}
    for work, task in {"read": lambda *_: None, "train mlp": learner("mlp"), "train lenet": learner("lenet")}.items():
        for lanes in ways.values():
            speed(lanes, task, seconds / 2)
        for index in range(pairs):
            for name, lanes in [*ways.items()][:: 1 if index % 2 else -1]:
                found.setdefault(f"{work}: {name}", []).append(speed(lanes, task, seconds))
    return found


def learner(name: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A step of a model on one lane."""
    train_rank.fix_bits(1)
    model = models.build(name, 3, SIDE, 10).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def speed(lanes: Iterator[tuple[torch.Tensor, torch.Tensor]], task: Callable[..., None], seconds: float) -> float:
    """Images a second of some work."""
    count, started_at = 0, time.monotonic()
    while (elapsed_seconds := time.monotonic() - started_at) < seconds:
        images, labels = next(lanes)
        task(images, labels)
        count += len(labels)
    return count / elapsed_seconds


def starting(scratch: Path, pairs: int) -> dict[str, list[float]]:
    """Seconds from `train` to the first figure, on 10 GB and on 10 MB of prepared images; the very first start reads all."""
    files = {name: packed(scratch / name, size, 96) for name, size in (("10 MB", 10**7), ("10 GB", 10**10))}
    # What was written a moment ago is read once more.
    time.sleep(5)
    found: dict[str, list[float]] = {name: [] for name in ("10 GB, the first", "10 MB", "10 GB")}
    for index in range(1 + pairs):
        for name, params in files.items():
            seconds = to_first_figure(params)
            if index:
                found[name].append(seconds)
            elif name == "10 GB":
                found["10 GB, the first"].append(seconds)
    return found


def to_first_figure(params: Path) -> float:
    """Train until the journal has a figure, and stop."""
    words = [sys.executable, "-m", "pipeline", "train", "--params", str(params)]
    started_at = time.monotonic()
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        while not any(line["kind"] == "metrics" for path in params.parent.glob("runs/*/journal.jsonl") for line in starts.read(path)):
            assert process.poll() is None
            time.sleep(0.02)
        return time.monotonic() - started_at
    finally:
        process.terminate()
        process.wait()
        # The next one begins anew.
        for path in params.parent.glob("runs/*"):
            path.rename(params.parent / f"done-{time.monotonic_ns()}")


def report(scratch: Path, pairs: int, seconds: float) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """What is measured in each part, and its figures with their ratios."""
    images = scratch / "images"
    make(images, COUNT)
    found = preparing(images, scratch, pairs)
    ratio = {"2 independent decoders / prepare": [*map(truediv, found["2 independent decoders"], found["prepare, 2 cores"])]}
    yield f"{COUNT:,} JPEGs of 240 to 640 pixels a side to {SIDE}, seconds; the same digest on 1 and on 2 cores:", found | ratio
    found = reading(images, scratch, pairs, seconds)
    ratios: dict[str, list[float]] = {}
    for name, values in found.items():
        for base in ("in memory", TAUGHT):
            if name != (other := f"{name.partition(':')[0]}: {base}"):
                ratios[f"{name} / {base}"] = [*map(truediv, values, found[other])]
    yield f"images/s in lanes of {LANE}, crop-flip, one thread:", found | ratios
    yield "seconds from `train` to the first figure, by the size of the prepared images:", starting(scratch, pairs)
