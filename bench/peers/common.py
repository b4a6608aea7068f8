"""What the peers' loops have in common: Fashion-MNIST through torchvision's own data set, the same model, and a stopwatch."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn
from torch.utils.data import Dataset
from torchvision import datasets, transforms

from pipeline import models

MEAN, STD = (0.2860,), (0.3530,)


@dataclass(frozen=True)
class Work:
    """What one rank is to do: `torchrun SCRIPT '{"model": "lenet", ...}'`."""

    root: str
    model: str
    side: int
    batch: int
    warm: int
    steps: int
    workers: int

    def dataset(self, train: bool = True) -> "Dataset[Any]":
        """Images one by one, as torchvision's references and tutorials read them."""
        resize = [] if self.side == 28 else [transforms.Resize(self.side)]
        transform = transforms.Compose([*resize, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
        return datasets.FashionMNIST(self.root, train, transform)

    def loader(self, **more: Any) -> dict[str, Any]:
        """What a DataLoader is to be told beside its data set."""
        return {"batch_size": self.batch, "num_workers": self.workers, "drop_last": True, "persistent_workers": self.workers > 0, **more}

    def build(self) -> nn.Module:
        """The same modules as the product's."""
        return models.build(self.model, 1, self.side, 10)


class Stopwatch:
    """Times the steps after the first ones."""

    def __init__(self, work: Work):
        self._work, self._done, self._started_at = work, 0, 0.0

    def step(self) -> bool:
        """Count a step; True when it was the last one."""
        self._done += 1
        if self._done == self._work.warm:
            self._started_at = time.monotonic()
        return self._done == self._work.warm + self._work.steps

    def show(self, ranks: int) -> None:
        """Print images a second of all ranks together."""
        print(json.dumps({"images_per_second": self._work.steps * self._work.batch * ranks / (time.monotonic() - self._started_at)}))


def work() -> Work:
    """Return what the command line says; one thread a rank, as the product has."""
    torch.set_num_threads(1)
    return Work(**json.loads(sys.argv[1]))
