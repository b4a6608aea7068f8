"""The catalogue of strategies: one module each, with `build(task, lanes, ranks, settings) -> Strategy`.

A strategy turns one global batch into gradients. After `backward(step)` the gradients are those of the mean loss over the
whole global batch, however it was split.
"""

import importlib
from typing import TYPE_CHECKING, Protocol

from pipeline.config import unknown

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from pipeline.config import Dist
    from pipeline.parallel.lanes import Lanes, Task, Totals
    from pipeline.ranks import Ranks

CATALOGUE = {
    "allreduce": "pipeline.parallel.allreduce",
    "ddp": "pipeline.parallel.ddp",
    "fsdp": "pipeline.parallel.fsdp",
    "graphs": "pipeline.parallel.graphs",
}


class Holding(Protocol):
    """Which part of a model a rank holds."""

    # What the optimizer updates on this rank, by name.
    parameters: "dict[str, Parameter]"
    # True if that is less than the whole.
    sharded: bool

    def part(self, name: str, whole: "Tensor") -> "Tensor":
        """Return this rank's part of a parameter's values, or of values that belong to them."""
        ...

    def whole(self, name: str, part: "Tensor") -> "Tensor":
        """Return the whole of them; every rank must call it."""
        ...


class Strategy(Holding, Protocol):
    """One way to turn a global batch into gradients."""

    def follow(self, optimizer: "Optimizer") -> None:
        """Learn of the optimizer of these parameters, before its first step."""
        ...

    def backward(self, step: int) -> "Totals": ...


def check(name: str) -> None:
    """ConfigError unless dist.strategy is in the catalogue."""
    if name not in CATALOGUE:
        raise unknown("dist.strategy", name, list(CATALOGUE))


def build(task: "Task", lanes: "Lanes", ranks: "Ranks", settings: "Dist") -> Strategy:
    """The strategy of params.yaml for one rank."""
    strategy: Strategy = importlib.import_module(CATALOGUE[settings.strategy]).build(task, lanes, ranks, settings)
    return strategy
