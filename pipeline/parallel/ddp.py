"""DistributedDataParallel: every rank holds the whole model and takes its lanes of the global batch."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from pipeline import collectives
from pipeline.config import ConfigError, Dist
from pipeline.parallel import hierarchy, shared_sums
from pipeline.parallel.lane_buffers import LaneBuffers
from pipeline.parallel.lane_groups import LaneGroups
from pipeline.parallel.lanes import ComputeRow, Lanes, Replicated, Task, Totals
from pipeline.parallel.ordered import LaneGradients
from pipeline.ranks import Ranks


def build(task: Task, lanes: Lanes, ranks: Ranks, settings: Dist) -> "Ddp":
    """DDP under the ordered reduction, or under the backend's own all-reduce."""
    sums: shared_sums.Sums = None, None
    if settings.reduction == "ordered":
        sums = shared_sums.build(task.model, lanes, ranks, settings) or (hierarchy.build(lanes, ranks, settings), None)
    return Ddp(task, lanes, ranks, sums, settings)


class Ddp(Replicated):
    """One lane, or group of them, after another; only the last one's backward meets the other ranks."""

    def __init__(self, task: Task, lanes: Lanes, ranks: Ranks, sums: shared_sums.Sums, settings: Dist):
        super().__init__(task.model)
        reduction, of_buffers = sums
        self._task, self._lanes, self._ranks, self.reads = task, lanes, ranks, lanes.own
        # Buffers are not broadcast: every lane starts from the same ones, and their mean is taken below.
        # Nor are weights where ranks come and go: those that come have got them from a peer.
        alike = collectives.in_vain is not None
        self._ddp = DistributedDataParallel(task.model, forward_sync_buffers=False, gradient_as_bucket_view=True, init_sync=not alike)
        # Else torch.compile would cut a model at the buckets in the last lane, which DDP computes, and in no other.
        torch._dynamo.config.optimize_ddp = False  # pyright: ignore[reportPrivateUsage]
        self._buffers, self._find_unused = LaneBuffers(task.model, lanes, of_buffers), settings.find_unused_parameters
        self._wanted = {name: one for name, one in task.model.named_parameters() if one.requires_grad}
        self._gradients = LaneGradients(lanes, ranks, list(self._wanted.values()), reduction) if reduction else None
        if self._gradients is not None:
            self._ddp.register_comm_hook(None, self._gradients.hook)
        # With its first backward DDP orders its buckets anew, and an all-reduce of three ranks sums in their order.
        self._has_ordered_buckets = reduction is not None or ranks.size == 1
        # DDP's own reduction is a mean over ranks, ours a sum over lanes.
        scale = (1 if reduction else ranks.size) / lanes.global_batch
        # What a user accumulates is to take less memory.
        most = 1 if reduction is None or self._find_unused else len(lanes.own) // settings.accumulation
        self._groups = LaneGroups(task, lanes, self._buffers, scale, most, ranks.heartbeat.computing)

    def backward(self, step: int) -> Totals:
        """Gradients of the mean loss over the global batch, and the step's totals."""
        if not self._has_ordered_buckets:
            self._has_ordered_buckets = True
            # A first backward for nothing: no step is another one because a start or a resume came before it.
            with self._buffers.kept():
                self.backward(step)
        for parameter in self.parameters.values():
            parameter.grad = None
        rows: list[ComputeRow] = []
        self._buffers.start()
        # DDP does so once, with broadcasts. In the forward of its own they would wait until the slowest rank is at its last lane.
        self._ddp.reducer._rebuild_buckets()
        self._ranks.heartbeat.computing(step)
        for group in self._groups.of_step(step):
            last = group.stop == self._lanes.own.stop
            # Backward meets the other ranks only after a forward of DDP's own.
            loss, rows_of_group = self._groups.forward(self._ddp if last else self._task.model, step, group, self._buffers)
            if last and self._gradients is None:
                loss.register_hook(self._waits_after_backward)
                # Before DDP waits for it in vain, also where an earlier micro-batch has given it a gradient.
                self._check([] if self._find_unused else absent(loss, self._wanted.values()))
            if last and self._gradients is not None:
                self._gradients.last_lanes = len(group)
            (with_all(loss, self._wanted.values()) if self._find_unused else loss).backward()  # pyright: ignore
            self._check([one for one in self._wanted.values() if one.grad is None])
            rows += rows_of_group
            if self._gradients is not None and not last:
                self._gradients.keep(group[0], len(group))
        self._buffers.finish()
        return Totals(rows, self._lanes, self._ranks)

    def _check(self, missing: list[Tensor]) -> None:
        """ConfigError if a parameter takes no part in the loss: DDP would wait for its gradient in vain."""
        for name, parameter in self._wanted.items() if missing else ():
            if parameter is missing[0]:
                raise ConfigError(f"model: {name} took no part in the loss; set dist.find_unused_parameters: true, or remove it")

    def _waits_after_backward(self, _: Tensor) -> None:
        """Tell that the own part is done, before DDP waits for the others: it queues that later, at the last bucket."""
        Variable._execution_engine.queue_callback(self._ranks.heartbeat.waiting)  # pyright: ignore


def absent(loss: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters that take no part in a loss."""
    found, nodes = set[Any](), [loss.grad_fn]
    taking_part: set[Tensor] = set()
    while nodes:
        node: Any = nodes.pop()
        if hasattr(node, "variable"):
            taking_part.add(node.variable)
        further = [one for one, _ in node.next_functions if one is not None and one not in found]
        found.update(further)
        nodes += further
    return [one for one in parameters if one not in taking_part]


def with_all(loss: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """The same loss, of which those parameters are a part too, with gradients of zeros, that were not."""
    nothing = [one.unsqueeze(0)[:0].sum() for one in absent(loss, parameters)]
    return loss + torch.stack(nothing).sum() if nothing else loss
