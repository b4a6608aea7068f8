"""The catalogue of strategies: one module each, with `build(task, lanes, ranks, settings) -> Strategy`.

A strategy turns one global batch into gradients. After `backward(step)` the gradients are those of the mean loss over the
whole global batch, however it was split.
"""

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from pipeline.config import ConfigError, unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from pipeline.config import Dist
    from pipeline.parallel.lanes import Lanes, Task, Totals
    from pipeline.ranks import Ranks

CATALOGUE = {
    "allreduce": "pipeline.parallel.allreduce",
    "dataparallel": "pipeline.parallel.dataparallel",
    "ddp": "pipeline.parallel.ddp",
    "fsdp": "pipeline.parallel.fsdp",
    "graphs": "pipeline.parallel.graphs",
    "pipeline": "pipeline.parallel.pipeline",
    "tensor": "pipeline.parallel.tensor",
}
# How a strategy does what it does; the first is what null means, but for ddp on gloo: there see shared_sums and hierarchy.
ALGORITHMS = {"ddp": ("flat", "hierarchical", "butterfly"), "allreduce": ("ring", "naive"), "pipeline": ("1f1b", "gpipe")}
# Those of which a rank holds a part of the model.
IN_PARTS = ("fsdp", "pipeline", "tensor")


class Holding(Protocol):
    """Which part of a model a rank holds."""

    # What the optimizer updates on this rank, by name.
    parameters: "dict[str, Parameter]"
    # True if that is less than the whole.
    sharded: bool
    # The shapes of the whole parameters; what ranks hold of one is the whole in the order of ranks.
    shapes: "dict[str, torch.Size]"

    def part(self, name: str, whole: "Tensor") -> "Tensor":
        """Return this rank's part of a parameter's values, or of values that belong to them."""
        ...

    def counts(self, name: str) -> bool:
        """Return True on one of the ranks that hold the same part of a parameter: a sum over ranks then has each part once."""
        ...


class Strategy(Holding, Protocol):
    """One way to turn a global batch into gradients."""

    # The lanes of a step whose samples this rank reads.
    reads: range

    def follow(self, optimizer: "Optimizer") -> None:
        """Learn of the optimizer of these parameters, before its first step."""
        ...

    def backward(self, step: int) -> "Totals": ...


def check(settings: "Dist") -> None:
    """ConfigError unless dist.strategy is in the catalogue, and the other settings suit it."""
    if settings.strategy not in CATALOGUE:
        raise unknown("dist.strategy", settings.strategy, list(CATALOGUE))
    for problem in problems(settings):
        raise ConfigError(f"dist.{problem}")


def problems(settings: "Dist") -> Iterator[str]:
    """Yield what does not suit dist.strategy."""
    name, own, algorithms = settings.strategy, settings.lanes_per_rank, ALGORITHMS.get(settings.strategy, ())
    if settings.algorithm not in (None, *algorithms):
        takes = f"takes {' or '.join(algorithms)}" if algorithms else "has one algorithm alone"
        yield f"algorithm: {settings.algorithm}: strategy: {name} {takes}; set algorithm: null"
    if name == "ddp" and settings.algorithm and settings.reduction == "native":
        yield f"algorithm: {settings.algorithm}: under reduction: native the backend has its own; set algorithm: null"
    if settings.replicas > 1 and name not in ("fsdp", "pipeline"):
        yield f"replicas: strategy: {name} has one copy of the model, or one on each rank; set replicas: 1"
    if settings.world_size % settings.replicas:
        yield f"replicas: {settings.replicas} does not divide world_size ({settings.world_size})"
    if name == "fsdp" and own == "auto":
        yield "lanes_per_rank: fsdp computes in step, so ranks own equal numbers of lanes; set lanes_per_rank: null"
    if name == "fsdp" and len(set(settings.pieces_per_rank)) > 1:
        why = f"lanes_per_rank: {own}" if own else f"lanes: {settings.lanes} on {settings.world_size} ranks"
        yield f"{why}: fsdp computes in step, so every rank owns as many; set another number, or strategy: ddp"
    if settings.sync_batchnorm and settings.reduction == "ordered":
        yield "sync_batchnorm: under reduction: ordered a lane has statistics of its own; set reduction: native and lanes: null, or false"
    if settings.sync_batchnorm and name not in ("ddp", "allreduce", "fsdp"):
        yield f"sync_batchnorm: {name} does not bring the ranks' micro-batches together in a layer; set ddp, allreduce or fsdp"
    if settings.sync_batchnorm and settings.find_unused_parameters and name == "ddp":
        # Gradients of what one rank alone uses are ready at another place among BatchNorm's sums, and a collective meets a different one.
        yield "find_unused_parameters: ddp with sync_batchnorm needs all parameters on all ranks; set strategy: allreduce, or false"
    if settings.find_unused_parameters and name == "fsdp":
        yield "find_unused_parameters: fsdp waits for the gradients of a whole block; set ddp, or false"
    if name == "pipeline" and own is not None:
        yield "lanes_per_rank: all lanes go through every rank of a pipeline; set lanes_per_rank: null"
    if name == "tensor" and settings.reduction == "ordered":
        yield "reduction: tensor adds up in an order that the number of ranks changes; set reduction: native and lanes: null"
    if name == "dataparallel" and settings.world_size > 1:
        yield "world_size: dataparallel is one process with all GPUs; set world_size: 1"
    if name == "dataparallel" and (own == "auto" or settings.reduction == "native"):
        yield "strategy: dataparallel knows neither lanes_per_rank: auto nor reduction: native; set null and ordered"


def build(task: "Task", lanes: "Lanes", ranks: "Ranks", settings: "Dist") -> Strategy:
    """The strategy of params.yaml for one rank."""
    names = {name for name, _ in task.model.named_parameters(remove_duplicate=False)}
    if settings.strategy in IN_PARTS and (tied := names - {name for name, _ in task.model.named_parameters()}):
        raise ConfigError(f"dist.strategy: {settings.strategy}: {min(tied)} is the same weight as another, which is held whole; set ddp")
    if settings.sync_batchnorm and ranks.size > 1:
        importlib.import_module("pipeline.parallel.sync_batchnorm").synchronize(task.model, ranks)
    strategy: Strategy = importlib.import_module(CATALOGUE[settings.strategy]).build(task, lanes, ranks, settings)
    return strategy
