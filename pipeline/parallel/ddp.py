"""DistributedDataParallel: every rank holds the whole model and takes its lanes of the global batch."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from pipeline.parallel.lanes import Lanes, Task, Totals, TreeNode, push
from pipeline.parallel.ordered import LaneGradients, OrderedSum, add
from pipeline.ranks import Ranks


def build(task: Task, lanes: Lanes, ranks: Ranks, reduction: str) -> "Ddp":
    """DDP under the ordered reduction, or under the backend's own all-reduce."""
    return Ddp(task, lanes, ranks, reduction == "ordered")


class Ddp:
    """One lane after another; only the last one's backward meets the other ranks."""

    def __init__(self, task: Task, lanes: Lanes, ranks: Ranks, ordered: bool):
        self._task, self._lanes, self._ranks = task, lanes, ranks
        # Buffers are not broadcast: every lane starts from the same ones, and their mean is taken below.
        self._ddp = DistributedDataParallel(task.model, forward_sync_buffers=False, gradient_as_bucket_view=True)
        self._buffers = LaneBuffers(task.model, lanes, ranks)
        self._gradients = LaneGradients(lanes, ranks, [one for one in task.model.parameters() if one.requires_grad]) if ordered else None
        if self._gradients is not None:
            self._ddp.register_comm_hook(None, self._gradients.hook)
        # DDP's own reduction is a mean over ranks, ours a sum over lanes.
        self._scale = (1 if ordered else ranks.size) / lanes.global_batch

    def backward(self, step: int) -> Totals:
        """Gradients of the mean loss over the global batch, and the step's totals."""
        for parameter in self._task.model.parameters():
            parameter.grad = None
        rows: list[Tensor] = []
        self._buffers.start()
        self._ranks.heartbeat.computing(step)
        for lane in self._lanes.own:
            last = lane == self._lanes.own[-1]
            self._buffers.before_lane(lane)
            self._ranks.heartbeat.computing()
            with nullcontext() if last else self._ddp.no_sync():
                loss, row = self._task.forward(self._ddp, step, lane)
                # Backward changes no buffer: those of the last lane are on their way meanwhile.
                self._buffers.after_lane(lane)
                if last and self._gradients is None:
                    loss.register_hook(self._waits_after_backward)
                # A loss that is no number makes the gradients none either; any other is scaled by exactly `_scale`.
                (loss * (self._scale + (loss - loss).detach())).backward()  # pyright: ignore[reportUnknownMemberType]
            rows.append(row)
            if self._gradients is not None and not last:
                self._gradients.keep(lane)
        self._buffers.finish()
        return Totals(rows, self._lanes, self._ranks)

    def _waits_after_backward(self, _: Tensor) -> None:
        """Tell that the own part is done, before DDP waits for the others: it queues that later, at the last bucket."""
        Variable._execution_engine.queue_callback(self._ranks.heartbeat.waiting)  # pyright: ignore


class LaneBuffers:
    """A model's buffers in a step: each lane starts from the same ones; floating-point ones become the mean over lanes."""

    def __init__(self, model: nn.Module, lanes: Lanes, ranks: Ranks):
        # Of one type each, so that a device copies a list in one launch.
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        self._lists = list(by_type.values())
        self._floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._sum = OrderedSum(lanes, ranks)
        self._lanes = lanes
        self._before: list[list[Tensor]] = []
        self._stack: list[TreeNode[Tensor]] = []
        self._under_way: Any = None

    def start(self) -> None:
        """A step begins."""
        self._stack = []
        if len(self._lanes.own) > 1:
            self._before = [[buffer.clone() for buffer in buffers] for buffers in self._lists]

    def before_lane(self, lane: int) -> None:
        """Back to where the step began."""
        if lane != self._lanes.own[0]:
            for buffers, values in zip(self._lists, self._before, strict=True):
                torch._foreach_copy_(buffers, values)  # pyright: ignore

    def after_lane(self, lane: int) -> None:
        """Keep what the lane made of the floating-point buffers; after the last one, start to send them."""
        if not self._floating:
            return
        own = torch.cat([buffer.flatten() for buffer in self._floating])
        push(self._stack, (lane, 1, own), add)
        if lane == self._lanes.own[-1]:
            self._under_way = self._sum.scatter(self._stack, own)

    def finish(self) -> None:
        """Set the floating-point buffers to the mean over all lanes; whole numbers are those of one lane, the same in each."""
        if not self._floating:
            return
        self._sum.gather(self._under_way)
        mean = self._sum.result(self._under_way) / self._lanes.count
        pieces = mean.split([buffer.numel() for buffer in self._floating])
        torch._foreach_copy_(self._floating, [piece.view_as(buffer) for piece, buffer in zip(pieces, self._floating, strict=True)])  # pyright: ignore
