"""The optimizer and its learning rate, which is a function of the step alone."""

import math
from dataclasses import dataclass

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from pipeline.config import Config, Train


def optimizer(train: Train, parameters: list[Parameter]) -> Optimizer:
    """Return the optimizer of params.yaml, fused."""
    if train.optimizer == "adamw":
        return AdamW(parameters, lr=train.learning_rate, weight_decay=train.weight_decay, fused=True)
    assert train.momentum is not None
    return SGD(parameters, lr=train.learning_rate, momentum=train.momentum, weight_decay=train.weight_decay, fused=True)


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then constant or a half cosine down to zero."""

    kind: str
    peak: float
    warmup_steps: int
    total_steps: int

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.peak * (1 + math.cos(math.pi * done)) / 2

    def apply(self, optimizer: Optimizer, step: int) -> None:
        """Set the rate of a step."""
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step)


def build(config: Config, steps_per_epoch: int) -> Schedule:
    """Return the schedule of params.yaml."""
    train = config.train
    return Schedule(train.schedule, config.peak_learning_rate, train.warmup_epochs * steps_per_epoch, train.epochs * steps_per_epoch)


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the autocast dtype, or None for fp32."""
    return torch.bfloat16 if precision == "bf16" else None
