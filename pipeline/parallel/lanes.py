"""Lanes: the equal pieces of a global batch, who owns them, and the one tree in which their results are summed."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from pipeline.config import draw_seed
from pipeline.ranks import Ranks

T = TypeVar("T")
# A node of the tree: its first lane, how many lanes it spans, and their sum.
TreeNode = tuple[int, int, T]
# Computes the row of totals of one lane, which few steps need: those that are logged.
ComputeRow = Callable[[], Tensor]


@dataclass(frozen=True)
class Lanes:
    """Who owns which of the equal pieces of a global batch: ranks own contiguous ranges, in the order of ranks."""

    per_rank: list[int]
    rank: int
    global_batch: int

    @property
    def count(self) -> int:
        return sum(self.per_rank)

    @property
    def own(self) -> range:
        return self.of(self.rank)

    def of(self, rank: int) -> range:
        first = sum(self.per_rank[:rank])
        return range(first, first + self.per_rank[rank])


def maximal_nodes(lanes: range) -> Iterator[tuple[int, int]]:
    """The largest aligned blocks (first lane, size) that cover a range: the nodes that one rank can finish alone."""
    start = lanes.start
    while start < lanes.stop:
        size = 1
        while start % (2 * size) == 0 and start + 2 * size <= lanes.stop:
            size *= 2
        yield start, size
        start += size


def push(stack: list[TreeNode[T]], node: TreeNode[T], add: Callable[[T, T], T]) -> None:
    """Put a node on the stack and merge while the two topmost are siblings: a binary counter."""
    stack.append(node)
    while len(stack) > 1 and stack[-2][1] == stack[-1][1] and stack[-2][0] % (2 * stack[-1][1]) == 0:
        _, _, right = stack.pop()
        start, size, left = stack.pop()
        stack.append((start, 2 * size, add(left, right)))


def fold(stack: list[TreeNode[T]], add: Callable[[T, T], T]) -> T:
    """The sum of all lanes; where their number is no power of two, the last blocks are added first."""
    _, _, total = stack[-1]
    for _, _, left in reversed(stack[:-1]):
        total = add(left, total)
    return total


class Replicated:
    """What strategies have in common that hold the whole model on every rank."""

    sharded = False

    def __init__(self, model: nn.Module):
        self.parameters = dict(model.named_parameters())
        self.shapes = shapes(model)

    def follow(self, optimizer: Optimizer) -> None:
        """Whole tensors need nothing."""

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Nothing is shared out."""
        return whole

    def counts(self, name: str) -> bool:
        """Nothing is summed over ranks."""
        return True


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shapes of a model's parameters, by name."""
    return {name: one.shape for name, one in model.named_parameters()}


@dataclass(frozen=True)
class Task:
    """What a strategy is to differentiate: a model, the lanes of a step, and the loss."""

    model: nn.Module
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    seed: int
    label_smoothing: float
    autocast: Callable[[], AbstractContextManager[object]]
    class_weights: Tensor | None = None
    # A model of the user's own may draw from any generator.
    seeds_all: bool = False

    def forward(self, model: nn.Module, step: int, lane: int) -> tuple[Tensor, ComputeRow]:
        """The sum of the losses of one lane, and what computes its row of totals."""
        return self.loss(model, *self.begin(step, lane))

    def begin(self, step: int, lane: int) -> tuple[Tensor, Tensor]:
        """The batch of one lane; from here on its random draws depend on (seed, step, lane) alone."""
        images, labels = self.batch(step, lane)
        self.seed_draws(step, lane, images.device)
        return images, labels

    def seed_draws(self, step: int, lane: int, device: torch.device) -> None:
        """Start the generator that dropout draws from at the lane's seed."""
        seed = draw_seed(self.seed, "lane", step, lane)
        if self.seeds_all:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
        seed_draws(seed, device)

    def loss(self, model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> tuple[Tensor, ComputeRow]:
        """The sum of the losses of some images, and what computes their row of totals."""
        return self._loss(self._logits(model, images), labels)

    def losses(self, model: Callable[[Tensor], Tensor], images: Tensor, labels: list[Tensor]) -> tuple[Tensor, list[ComputeRow]]:
        """The sum of the losses of each of several lanes, whose images are one behind another, and what computes each one's row."""
        logits = self._logits(model, images)
        rows = [partial(self._row, *two) for two in zip(logits.detach().chunk(len(labels)), labels, strict=True)]
        # A row has the sum in the order of a lane alone; gradients are the same in any.
        return self._cross_entropy(logits, torch.cat(labels), "none").view(len(labels), -1).sum(1), rows

    def _logits(self, model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        with self.autocast():
            logits = model(images)
        # In fp32 at least.
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, ComputeRow]:
        loss = self._cross_entropy(logits, labels)
        return loss, partial(totals_row, loss.detach(), logits.detach(), labels)

    def _row(self, logits: Tensor, labels: Tensor) -> Tensor:
        return totals_row(self._cross_entropy(logits, labels), logits, labels)

    def _cross_entropy(self, logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        return F.cross_entropy(logits, labels, self.class_weights, reduction=reduction, label_smoothing=self.label_smoothing)


def totals_row(loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The sums of loss, of right answers and of those among the first five, of one lane."""
    # Of mixed images, the class of the larger share counts as right.
    correct, top5_correct = right_answers(logits, labels if labels.ndim == 1 else labels.argmax(1))
    return torch.stack([loss.double(), correct.double(), top5_correct.double()])


def right_answers(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """How many labels have the largest logit, and how many one of the five largest; of equal ones the first counts as larger."""
    classes = logits.shape[1]
    own = logits.gather(1, labels[:, None])
    before = torch.arange(classes, device=logits.device) < labels[:, None]
    # Its own is counted too. NaN is larger than nothing.
    smaller = torch.where(before, logits < own, logits <= own).sum(1)
    return (smaller == classes).sum(), (smaller > classes - 5).sum()


def seed_draws(seed: int, device: torch.device) -> None:
    """Start the device's own generator, the one that dropout draws from, at a seed."""
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def first_weights(model: nn.Module) -> None:
    """Give every rank the weights and buffers of rank 0, as DDP does: hosts may draw others."""
    for one in [*model.parameters(), *model.buffers()]:
        first = one.detach().contiguous()
        dist.broadcast(first, 0)
        one.detach().copy_(first)


def scaled(loss: Tensor, share: float) -> Tensor:
    """A loss times its share of the mean; one that is no number makes the gradients none either, and any other is scaled exactly."""
    return loss * (share + (loss - loss).detach())


def draws(device: torch.device) -> Tensor:
    """Where the generator stands that dropout draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_draws(state: Tensor, device: torch.device) -> None:
    """Go on from there."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state)


@dataclass(frozen=True)
class Totals:
    """Sums of loss, of right answers and of those among the first five of one step, a row for each own lane."""

    rows: list[ComputeRow]
    lanes: Lanes
    ranks: Ranks

    def over_ranks(self) -> dict[str, float]:
        """Means over the global batch, the same on all ranks and on any number of ranks; every rank must call it."""
        none = torch.zeros(0, 3, dtype=torch.float64, device=self.ranks.device)
        own = torch.cat([none, *(compute_row().to(none)[None] for compute_row in self.rows)])
        rows = self.ranks.gather_rows(own, self.lanes.per_rank)
        names = ("train/loss", "train/accuracy", "train/top5_accuracy")
        # Not on the device: a GPU would multiply with the reciprocal.
        return {name: total / self.lanes.global_batch for name, total in zip(names, rows.sum(0).tolist(), strict=True)}
