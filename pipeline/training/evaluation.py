"""Evaluation: every sample once, in chunks that do not depend on the ranks, summed in a fixed order."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.data import Split
from pipeline.data.batches import Pixels, chunks
from pipeline.parallel.lanes import right_answers
from pipeline.ranks import Ranks
from pipeline.training.guard import check_gpus

CHUNK = 250


@dataclass(frozen=True)
class Result:
    """Figures over a whole split, the same on every rank and any number of ranks."""

    loss: float
    correct: int
    top5_correct: int
    total: int
    # Row: the true class; column: the predicted one.
    confusion: Tensor

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def top5_accuracy(self) -> float:
        return self.top5_correct / self.total


class Evaluation:
    """One split, its chunks assigned to ranks; `in_step` where a model's ranks can only compute together."""

    def __init__(self, split: Split, pixels: Pixels, num_classes: int, ranks: Ranks, hold: bool = False, in_step: bool = False):
        self._pixels, self._ranks, self._num_classes, self._in_step = pixels, ranks, num_classes, in_step
        pieces = list(chunks(len(split.labels), CHUNK))
        whole, rest = divmod(len(pieces), ranks.size)
        self._per_rank = [whole + (rank < rest) for rank in range(ranks.size)]
        first = sum(self._per_rank[: ranks.rank])
        own = pieces[first : first + self._per_rank[ranks.rank]]
        self._split, self._own = split, own
        # Once, and not in every epoch.
        self._held = [(images.to(pixels.device), labels.to(pixels.device)) for images, labels in map(self._read, own)] if hold else None
        self._total = len(split.labels)
        sizes = iter(piece.stop - piece.start for piece in pieces)
        self._images_per_rank = [sum(next(sizes) for _ in range(count)) for count in self._per_rank]
        self._blank = torch.from_numpy(split.images[:1])

    def __call__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        stopped: Callable[[], bool] = lambda: False,
        each: list[Tensor] | None = None,
    ) -> Result | None:
        """Evaluate the split; every rank must call it. Returns None if `stopped`, the same on all ranks, becomes true.

        `each` takes what was predicted for this rank's images.
        """
        # FSDP would keep tensors of inference mode for the training.
        with torch.no_grad() if self._in_step else torch.inference_mode(), evaluating(model):
            return self._evaluate(model, dtype, stopped, each)

    def predictions(self, each: list[Tensor]) -> Tensor:
        """Return the predicted class, its probability and the loss of every image, on every rank."""
        rows = torch.cat(each) if each else torch.zeros((0, 3), dtype=torch.float64, device=self._pixels.device)
        return self._ranks.gather_rows(rows, self._images_per_rank).cpu()

    def _evaluate(
        self, model: nn.Module, dtype: torch.dtype | None, stopped: Callable[[], bool], each: list[Tensor] | None
    ) -> Result | None:
        device = self._pixels.device
        losses: list[Tensor] = []
        counts = torch.zeros(1 + self._num_classes**2, dtype=torch.int64, device=device)
        for index in range(max(self._per_rank)):
            if stopped():
                return None
            if index >= len(self._own):
                # This rank has a chunk less, and is asked as often.
                if self._in_step:
                    self._logits(model, self._blank, dtype)
                continue
            images, labels = self._held[index] if self._held else self._read(self._own[index])
            self._ranks.heartbeat.computing()
            labels = labels.to(device)
            logits = self._logits(model, images, dtype)
            losses.append(F.cross_entropy(logits, labels, reduction="sum").double())
            if each is not None:
                each.append(per_image(logits, labels))
            counts[0] += right_answers(logits, labels)[1]
            # `bincount` would wait for the device.
            counts[1:].index_add_(0, labels * self._num_classes + logits.argmax(1), torch.ones_like(labels))
        check_gpus()
        rows = torch.stack(losses) if losses else torch.zeros(0, dtype=torch.float64, device=device)
        loss = self._ranks.gather_rows(rows, self._per_rank).cpu().sum().item() / self._total
        counts = self._ranks.sum_integers(counts).cpu()
        confusion = counts[1:].view(self._num_classes, self._num_classes)
        return Result(loss, int(confusion.diagonal().sum()), int(counts[0]), self._total, confusion)

    def _read(self, piece: slice) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self._split.images[piece]), torch.from_numpy(self._split.labels[piece])

    def _logits(self, model: nn.Module, images: Tensor, dtype: torch.dtype | None) -> Tensor:
        with torch.autocast(self._pixels.device.type, dtype, enabled=dtype is not None):
            logits: Tensor = model(self._pixels(images))
        return logits.float()


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Put a model into evaluation for a while, and then every module of it back to what it was."""
    before = {one: one.training for one in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # A module may do more than set a flag when it is told.
        model.train(before[model])
        for one, training in before.items():
            one.training = training


def per_image(logits: Tensor, labels: Tensor) -> Tensor:
    """Return predicted class, its probability and the loss as a row an image."""
    probability, predicted = logits.softmax(1).max(1)
    loss = F.cross_entropy(logits, labels, reduction="none")
    return torch.stack([predicted.double(), probability.double(), loss.double()], dim=1)
