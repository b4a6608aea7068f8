"""Buckets of DDP: when ranks agree on them, and that they cut no compiled model."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import parallel
from pipeline.config import Dist
from pipeline.parallel.lanes import Lanes, Task
from tests.ranks.test_ddp_options import LANES, WIDTH, marked
from tests.ranks.test_strategies import BATCH


class Order:
    """DDP's reducer, and the batches that are read, in the order of their calls."""

    def __init__(self, reducer: Any):
        self._reducer, self.calls = reducer, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name in ("_rebuild_buckets", "prepare_for_backward"):
            self.calls.append(name)
        return getattr(self._reducer, name)


def buckets_made(group: Any) -> list[str]:
    """What the second step calls, in two lanes a rank."""
    order, read = Order(None), marked(LANES, torch.float32)

    def batch(step: int, lane: int) -> tuple[Tensor, Tensor]:
        order.calls.append("lane")
        return read(step, lane)

    task = Task(nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 20), nn.Linear(20, 10)), batch, 1, 0.0, nullcontext)
    strategy: Any = parallel.build(task, Lanes([2, 2], group.rank, BATCH), group, Dist.model_construct())
    strategy.backward(0)
    order._reducer = strategy._ddp.reducer
    strategy._ddp.reducer = order
    order.calls.clear()
    strategy.backward(1)
    return order.calls


def test_ranks_agree_on_new_buckets_where_a_step_begins(run_ranks) -> None:
    # In the last lane DDP asks once more, in vain.
    assert run_ranks(2, (buckets_made, ())) == [[["_rebuild_buckets", "lane", "lane", "_rebuild_buckets", "prepare_for_backward"]]] * 2


def graphs_made(group: Any) -> int:
    """In how many graphs a model is compiled whose gradients fill several buckets: rank 0 has one lane, which DDP computes."""
    made: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        made.append(graph)
        return graph.forward

    layers = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 4096), nn.Linear(4096, 2048), nn.Linear(2048, 10))
    layers.compile(backend=backend)
    task = Task(layers, marked(LANES, torch.float32), 1, 0.0, nullcontext, seeds_all=True)
    strategy = parallel.build(task, Lanes([1, 3], group.rank, BATCH), group, Dist.model_construct())
    strategy.backward(0)
    return len(made)


def test_a_model_that_calls_torch_compile_is_compiled_whole_on_every_rank(run_ranks) -> None:
    assert run_ranks(2, (graphs_made, ())) == [[1], [1]]
