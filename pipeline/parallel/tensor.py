"""Tensor parallelism: every rank holds some rows of each linear and convolutional layer, and computes these output features of every image.

All ranks go through all lanes together. What a layer puts out is gathered, so that layers without rows of their own (BatchNorm, dropout)
see the whole of it on every rank. The gradient of what went in is summed over the ranks, each of which has used it for its own rows: a
sum that another number of ranks adds up in another order. So it promises no bits, and takes `reduction: native` alone.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter
from torch.nn import functional as F

from pipeline.config import Dist
from pipeline.parallel import Strategy, ddp
from pipeline.parallel.lane_buffers import LaneBuffers
from pipeline.parallel.lanes import ComputeRow, Lanes, Replicated, Task, Totals, draws, first_weights, scaled, set_draws, shapes
from pipeline.ranks import Ranks


def build(task: Task, lanes: Lanes, ranks: Ranks, settings: Dist) -> Strategy:
    """Rows on every rank; alone, a rank has all of them."""
    return ddp.build(task, lanes, ranks, settings) if ranks.size == 1 else TensorParallel(task, lanes, ranks)


class TensorParallel(Replicated):
    """A part of every layer that is large enough; all lanes on every rank, one after another."""

    sharded = True

    def __init__(self, task: Task, lanes: Lanes, ranks: Ranks):
        model = task.model
        first_weights(model)
        self._task, self._ranks, whole = task, ranks, shapes(model)
        # Which parameters are in rows, and how many rows each rank has.
        self._rows: dict[str, list[int]] = {}
        layers: list[tuple[str, Any]] = list(model.named_modules())
        # Swin's attention computes with the weights of its layers itself, as others do with those of derived classes.
        windows = {id(one) for _, parent in layers if type(parent).__name__.startswith("ShiftedWindow") for one in parent.modules()}
        for name, layer in layers:
            in_rows = type(layer) in (nn.Linear, nn.Conv2d) and getattr(layer, "groups", 1) == 1 and id(layer) not in windows
            if in_rows and layer.weight.shape[0] >= ranks.size:
                self._cut(name, layer)
        super().__init__(model)
        self.shapes = whole
        self._lanes, self.reads = Lanes([lanes.count], 0, lanes.global_batch), range(lanes.count)
        self._totals = Lanes([lanes.count] + [0] * (ranks.size - 1), ranks.rank, lanes.global_batch)
        self._buffers = LaneBuffers(model, self._lanes)
        self._whole_forward: Any = model.forward
        model.forward = self._forward  # pyright: ignore[reportAttributeAccessIssue]

    def _cut(self, name: str, layer: Any) -> None:
        rows = [len(one) for one in torch.arange(layer.weight.shape[0]).tensor_split(self._ranks.size)]
        for key in ("weight", "bias"):
            whole = getattr(layer, key)
            if whole is not None:
                self._rows[f"{name}.{key}"] = rows
                part = whole.detach().split(rows)[self._ranks.rank]
                setattr(layer, key, Parameter(part.clone(memory_format=torch.preserve_format), whole.requires_grad))
        layer.forward = partial(forward_in_rows, layer, rows, self._ranks)

    def backward(self, step: int) -> Totals:
        """Gradients of the mean loss over the global batch, and the step's totals."""
        rows: list[ComputeRow] = []
        for parameter in self.parameters.values():
            parameter.grad = None
        self._buffers.start()
        self._ranks.heartbeat.computing(step)
        for lane in self._lanes.own:
            self._buffers.before_lane(lane)
            loss, compute_row = self._task.loss(self._whole_forward, *self._task.begin(step, lane))
            self._buffers.after_lane(lane)
            scaled(loss, 1 / self._lanes.global_batch).backward()  # pyright: ignore[reportUnknownMemberType]
            rows.append(compute_row)
        for parameter in self.parameters.values():
            if parameter.grad is None and parameter.requires_grad:
                # It took no part.
                parameter.grad = torch.zeros_like(parameter)
        self._buffers.finish()
        return Totals(self._ranks.on_rank_zero(lambda: rows, []), self._totals, self._ranks)

    def _forward(self, images: Tensor) -> Tensor:
        """The whole model, on images of every rank's own; all ranks call it at once."""
        logits, state = images, draws(images.device)
        shapes = self._ranks.gather_rows(torch.tensor([images.shape], device=images.device), [1] * self._ranks.size).tolist()
        for source, shape in enumerate(shapes):
            mine = source == self._ranks.rank
            entering = images.contiguous() if mine else images.new_empty(shape)
            dist.broadcast(entering, source)
            # Dropout draws on every rank what it draws on that one.
            begin = state.to(images.device, copy=True)
            dist.broadcast(begin, source)
            set_draws(begin.cpu(), images.device)
            found = self._whole_forward(entering)
            logits = found if mine else logits
        return logits

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows of a layer that is cut, and all of any other."""
        return whole.split(self._rows[name])[self._ranks.rank] if name in self._rows else whole

    def counts(self, name: str) -> bool:
        """Rows are on one rank each, and what is not cut is on all of them."""
        return name in self._rows or self._ranks.on_rank_zero(lambda: True, False)


def forward_in_rows(layer: Any, rows: list[int], ranks: Ranks, entering: Tensor) -> Tensor:
    """What a layer puts out, of which every rank computes its own features."""
    entering = Used.apply(entering, ranks)  # pyright: ignore
    if isinstance(layer, nn.Conv2d):
        own = layer._conv_forward(entering, layer.weight, layer.bias)  # pyright: ignore[reportPrivateUsage]
        return Gathered.apply(own, rows, 1, ranks)  # pyright: ignore
    return Gathered.apply(F.linear(entering, layer.weight, layer.bias), rows, entering.ndim - 1, ranks)  # pyright: ignore


class Used(Function):
    """What goes into a layer; every rank has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, entering: Tensor, ranks: Ranks) -> Tensor:  # pyright: ignore
        """As it is."""
        ctx.ranks = ranks
        return entering.view_as(entering)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        """The sum over ranks."""
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
        ctx.ranks.heartbeat.waiting()
        dist.all_reduce(total)
        ctx.ranks.heartbeat.computing()
        return total.to(gradient.dtype), None


class Gathered(Function):
    """All ranks' features; each rank takes the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: list[int], features: int, ranks: Ranks) -> Tensor:  # pyright: ignore
        """Gather."""
        ctx.rows, ctx.features, ctx.rank = rows, features, ranks.rank
        whole = ranks.gather_rows(own.movedim(features, 0), rows).movedim(0, features)
        ranks.heartbeat.computing()
        # A copy: the layer behind may work in place.
        return whole.clone(memory_format=torch.channels_last if own.ndim == 4 else torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        """The own features."""
        return gradient.split(ctx.rows, ctx.features)[ctx.rank], None, None, None
