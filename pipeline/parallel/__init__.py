"""The catalogue of strategies: one module each, with `build(task, lanes, ranks, reduction) -> Strategy`.

A strategy turns one global batch into gradients. After `backward(step)` the gradients are those of the mean loss over the
whole global batch, however it was split.
"""

import importlib
from typing import TYPE_CHECKING, Protocol

from pipeline.config import unknown

if TYPE_CHECKING:
    from pipeline.parallel.lanes import Lanes, Task, Totals
    from pipeline.ranks import Ranks

CATALOGUE = {
    "ddp": "pipeline.parallel.ddp",
    "graphs": "pipeline.parallel.graphs",
}


class Strategy(Protocol):
    """One way to turn a global batch into gradients."""

    def backward(self, step: int) -> "Totals": ...


def check(name: str) -> None:
    """ConfigError unless dist.strategy is in the catalogue."""
    if name not in CATALOGUE:
        raise unknown("dist.strategy", name, list(CATALOGUE))


def build(name: str, task: "Task", lanes: "Lanes", ranks: "Ranks", reduction: str) -> Strategy:
    """The named strategy for one rank."""
    strategy: Strategy = importlib.import_module(CATALOGUE[name]).build(task, lanes, ranks, reduction)
    return strategy
