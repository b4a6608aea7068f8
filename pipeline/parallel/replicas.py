"""A whole model on every rank: one lane after another, then one sum of all gradients as one flat tensor."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.lane_buffers import LaneBuffers
from pipeline.parallel.lanes import ComputeRow, Lanes, Replicated, Task, Totals, TreeNode, push, scaled
from pipeline.parallel.layouts import flat, views
from pipeline.parallel.ordered import OrderedSum, add
from pipeline.ranks import Ranks

# From the sums of a rank's own lanes, as nodes of the tree, to the sum over all ranks.
Reduce = Callable[[list[TreeNode[Tensor]]], Tensor]


@dataclass(frozen=True)
class FlatTask:
    """A task whose gradients are flat tensors, in the order of its parameters."""

    task: Task
    global_batch: int
    parameters: list[Tensor]

    def lane(self, step: int, lane: int) -> tuple[ComputeRow, Tensor]:
        """What computes the row of totals, and the flat gradient, of one lane."""
        return self.gradient(*self.task.begin(step, lane))

    def gradient(self, images: Tensor, labels: Tensor) -> tuple[ComputeRow, Tensor]:
        """The same of images that are at hand."""
        loss, compute_row = self.task.loss(self.task.model, images, labels)
        gradients = torch.autograd.grad(scaled(loss, 1 / self.global_batch), self.parameters, materialize_grads=True)
        return compute_row, flat(list(gradients), self.parameters)

    def views(self, values: Tensor) -> list[Tensor]:
        """One flat tensor as the parameters lie in memory."""
        return views(values, self.parameters)


def flat_task(task: Task, lanes: Lanes) -> FlatTask:
    """Return a task with the weights of rank 0 on every rank, as DDP does: hosts may draw other first weights."""
    flattened = FlatTask(task, lanes.global_batch, [one for one in task.model.parameters() if one.requires_grad])
    first = flat([one.detach() for one in flattened.parameters], flattened.parameters)
    dist.broadcast(first, 0)
    with torch.no_grad():
        for parameter, value in zip(flattened.parameters, flattened.views(first), strict=True):
            parameter.copy_(value)
    return flattened


class Replicas(Replicated):
    """How a lane is differentiated, and how the sums of all ranks' lanes are brought together, is given."""

    def __init__(
        self,
        task: FlatTask,
        lanes: Lanes,
        ranks: Ranks,
        lane: Callable[[int, int], tuple[ComputeRow, Tensor]],
        reduce: Reduce,
    ):
        super().__init__(task.task.model)
        self._task, self._lanes, self._ranks = task, lanes, ranks
        self._lane, self._reduce, self.reads = lane, reduce, lanes.own
        self._buffers = LaneBuffers(task.task.model, lanes)

    def backward(self, step: int) -> Totals:
        """Gradients of the mean loss over the global batch, and the step's totals."""
        rows: list[ComputeRow] = []
        stack: list[TreeNode[Tensor]] = []
        for parameter in self._task.parameters:
            # Those of the last step.
            parameter.grad = None
        self._buffers.start()
        self._ranks.heartbeat.computing(step)
        for lane in self._lanes.own:
            self._buffers.before_lane(lane)
            self._ranks.heartbeat.computing()
            compute_row, gradient = self._lane(step, lane)
            self._buffers.after_lane(lane)
            rows.append(compute_row)
            push(stack, (lane, 1, gradient), add)
        self._ranks.heartbeat.waiting()
        for parameter, gradient in zip(self._task.parameters, self._task.views(self._reduce(stack)), strict=True):
            parameter.grad = gradient
        self._buffers.finish()
        return Totals(rows, self._lanes, self._ranks)


def in_the_tree(lanes: Lanes, group: "dist.ProcessGroup | None" = None) -> Reduce:
    """The ordered sum over all lanes."""
    sums = OrderedSum(lanes, group)

    def reduce(stack: list[TreeNode[Tensor]]) -> Tensor:
        under_way = sums.scatter(stack, stack[-1][2])
        sums.gather(under_way)
        return sums.result(under_way)

    return reduce
