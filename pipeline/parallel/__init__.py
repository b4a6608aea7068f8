"""The catalogue of strategies: one module each, with `build(task, lanes, ranks, settings) -> Strategy`.

A strategy turns one global batch into gradients. After `backward(step)` the gradients are those of the mean loss over the
whole global batch, however it was split.
"""

import importlib
from typing import TYPE_CHECKING, Protocol

from pipeline.config import unknown

if TYPE_CHECKING:
    from pipeline.config import Dist
    from pipeline.parallel.lanes import Lanes, Task, Totals
    from pipeline.ranks import Ranks

CATALOGUE = {
    "allreduce": "pipeline.parallel.allreduce",
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


def build(task: "Task", lanes: "Lanes", ranks: "Ranks", settings: "Dist") -> Strategy:
    """The strategy of params.yaml for one rank."""
    strategy: Strategy = importlib.import_module(CATALOGUE[settings.strategy]).build(task, lanes, ranks, settings)
    return strategy
