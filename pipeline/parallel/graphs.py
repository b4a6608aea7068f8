"""CUDA graphs: the forward and backward of one lane, captured once and replayed, so that a small model does not wait for launches.

The kernels are those of `ddp`, and so are the bits. On a CPU nothing is captured: the same steps run one by one.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config import ConfigError, Dist
from pipeline.parallel.lanes import ComputeRow, Lanes, Task, TreeNode, fold
from pipeline.parallel.ordered import add
from pipeline.parallel.replicas import FlatTask, Replicas, flat_task, in_the_tree
from pipeline.ranks import Ranks

# As many as torch asks for before a capture: libraries choose their kernels and allocate in the first ones.
WARM_UP = 3


def build(task: Task, lanes: Lanes, ranks: Ranks, settings: Dist) -> Replicas:
    """Graphs under the ordered reduction, or under the backend's own all-reduce."""
    own = flat_task(task, lanes)
    lane = own.lane if ranks.device.type == "cpu" else Graph(own).lane
    return Replicas(own, lanes, ranks, lane, in_the_tree(lanes) if settings.reduction == "ordered" else all_reduced)


def all_reduced(stack: list[TreeNode[Tensor]]) -> Tensor:
    """The sum over all lanes, by the backend's all-reduce."""
    total = fold(stack, add)
    dist.all_reduce(total)
    return total


@dataclass(frozen=True)
class Captured:
    """A graph, and the memory that it reads and writes."""

    graph: "torch.cuda.CUDAGraph"
    images: Tensor
    labels: Tensor
    row: Tensor
    gradient: Tensor


class Graph:
    """One lane of a task, captured at its first step."""

    def __init__(self, task: FlatTask):
        self._task = task
        self._captured: Captured | None = None

    def lane(self, step: int, lane: int) -> tuple[ComputeRow, Tensor]:
        """What computes the row of totals, and the flat gradient, of one lane."""
        images, labels = self._task.task.begin(step, lane)
        if self._captured is None:
            self._captured = self._capture(images, labels)
            # To warm up has drawn.
            self._task.task.seed_draws(step, lane, images.device)
        captured = self._captured
        captured.images.copy_(images)
        captured.labels.copy_(labels)
        captured.graph.replay()
        # The next replay writes into the same memory.
        row = captured.row.clone()
        return lambda: row, captured.gradient.clone()

    def _capture(self, images: Tensor, labels: Tensor) -> Captured:
        images, labels = images.clone(), labels.clone()
        model = self._task.task.model
        before = [buffer.clone() for buffer in model.buffers()]
        here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP):
                compute_row, _ = self._task.gradient(images, labels)
                compute_row()
        here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: NCCL's watchdog asks for events meanwhile.
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                compute_row, gradient = self._task.gradient(images, labels)
                row = compute_row()
        except RuntimeError as error:
            raise why_not_captured(error) from error
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        return Captured(graph, images, labels, row, gradient)


def why_not_captured(error: RuntimeError) -> Exception:
    """What went wrong first: the end of a capture that failed raises once more, and says nothing of it."""
    first = error.__context__ if isinstance(error.__context__, Exception) else error
    if isinstance(first, torch.OutOfMemoryError):
        return first
    said = (str(first).splitlines() or [type(first).__name__])[0]
    return ConfigError(f"dist.strategy: graphs cannot capture this model's step ({said}); set dist.strategy: ddp")
