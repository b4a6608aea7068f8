"""Pipeline parallelism: every rank holds the layers of one stage, and lanes go through the stages one behind another.

The lanes are the micro-batches. A stage adds up the gradients of its own layers, over all lanes and in the tree that `ddp` uses, with
the same stage of other copies of the model if there are any: the bits are those of `ddp`. `dist.algorithm` says when a stage turns
back. `1f1b`: as soon as a gradient can be there, so that a stage keeps the activations of no more lanes than there are stages from it
to the last one. `gpipe`: all lanes forward, then all backward.
"""

from collections import deque
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from pipeline.config import Dist
from pipeline.parallel import Strategy, ddp
from pipeline.parallel.lane_buffers import floating, set_floating
from pipeline.parallel.lanes import (
    ComputeRow,
    Lanes,
    Replicated,
    Task,
    Totals,
    TreeNode,
    draws,
    first_weights,
    push,
    scaled,
    set_draws,
    shapes,
)
from pipeline.parallel.layouts import flat, views
from pipeline.parallel.mesh import groups
from pipeline.parallel.messages import Messages
from pipeline.parallel.ordered import add
from pipeline.parallel.replicas import in_the_tree
from pipeline.parallel.stages import cut
from pipeline.ranks import Ranks
from pipeline.timeouts import collective_seconds

# A lane's activations as they entered and left this stage; for the last stage, what left is its scaled loss.
Passed = tuple[Tensor, Tensor]


def build(task: Task, lanes: Lanes, ranks: Ranks, settings: Dist) -> Strategy:
    """A stage for each rank of a copy of the model; alone, a rank has the whole model."""
    return ddp.build(task, lanes, ranks, settings) if ranks.size == settings.replicas else Pipeline(task, lanes, ranks, settings)


class Pipeline(Replicated):
    """One stage; what it sends is on its way while it computes the next lane."""

    sharded = True

    def __init__(self, task: Task, lanes: Lanes, ranks: Ranks, settings: Dist):
        model = task.model
        first_weights(model)
        count = ranks.size // settings.replicas
        stages = cut(model, count)
        self._first, self._last = ranks.rank - ranks.rank % count, ranks.rank - ranks.rank % count + count - 1
        self._is_first, self._is_last = ranks.rank == self._first, ranks.rank == self._last
        index = ranks.rank - self._first
        self._stage = stages[index]
        self._owners = owners(model, stages)
        # Of one stage and type together.
        self._buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for name, one in model.named_buffers():
            self._buffers.setdefault((self._owners[name], one.dtype), []).append(one)
        whole = shapes(model)
        for name, one in model.named_parameters():
            if self._owners[name] != index:
                one.data = torch.empty(0, dtype=one.dtype, device=one.device)
        super().__init__(model)
        self.shapes = whole
        self._own: list[Tensor] = [one for name, one in model.named_parameters() if one.requires_grad and self._owners[name] == index]
        self._task, self._model, self._ranks, self._index = task, model, ranks, index
        timeout = timedelta(seconds=collective_seconds(settings.timeout_seconds))
        # A lane's activations and its draws go on together; a stage is never more lanes ahead of another than there are ranks.
        self._onward, self._back = (Messages(ranks, timeout, 2 * count) for _ in range(2))
        # All lanes of a copy's ranks go through each of its stages.
        per_copy = [sum(lanes.per_rank[first : first + count]) for first in range(0, ranks.size, count)]
        self._lanes = Lanes(per_copy, ranks.rank // count, lanes.global_batch)
        self._totals = Lanes([own for several in per_copy for own in [0] * (count - 1) + [several]], ranks.rank, lanes.global_batch)
        # How many lanes a stage is ahead of the gradients that come back.
        self._ahead = len(self._lanes.own) if settings.algorithm == "gpipe" else min(count - index, len(self._lanes.own))
        self._reduce = in_the_tree(self._lanes, groups(ranks, settings)[1])
        self.reads = self._lanes.own if self._is_first or self._is_last else range(0)
        model.forward = self._forward  # pyright: ignore[reportAttributeAccessIssue]

    def backward(self, step: int) -> Totals:
        """Gradients of the mean loss over the global batch, and the step's totals."""
        rows: list[ComputeRow] = []
        stack: list[TreeNode[Tensor]] = []
        passed: deque[Passed] = deque()
        lanes = self._lanes.own
        buffers: list[TreeNode[Tensor]] = []
        own: dict[str, Tensor] = {}
        for parameter in self.parameters.values():
            # An optimizer then has a state of every parameter on every rank.
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad and not parameter.numel() else None
        self._ranks.heartbeat.computing(step)
        for turn in range(len(lanes) + self._ahead):
            if turn >= self._ahead:
                push(stack, (lanes[turn - self._ahead], 1, self._differentiate(*passed.popleft())), add)
            if turn < len(lanes):
                # Every lane starts from the same ones, and backward looks at those that it had.
                own = {name: one.clone() for name, one in self._stage.named_buffers()}
                passed.append(self._pass(step, lanes[turn], own, rows))
                push(buffers, (lanes[turn], 1, floating(own.values())), add)
        self._onward.wait()
        self._back.wait()
        self._ranks.heartbeat.waiting()
        if self._own:
            for parameter, gradient in zip(self._own, views(self._reduce(stack), self._own), strict=True):
                parameter.grad = gradient
        self._set_buffers(buffers, own)
        return Totals(rows, self._totals, self._ranks)

    def _pass(self, step: int, lane: int, buffers: dict[str, Tensor], rows: list[ComputeRow]) -> Passed:
        """One lane's forward through this stage."""
        # Only the first stage needs images, and only the last one labels.
        entering, labels = self._task.begin(step, lane) if lane in self.reads else (torch.empty(0), torch.empty(0))
        if not self._is_first:
            entering = self._take_over(self._onward, self._ranks.rank - 1).requires_grad_()
        # A layer that works in place may not do so on what is differentiated for.
        stage = partial(functional_call, self._stage, buffers)
        if self._is_last:
            loss, compute_row = self._task.loss(stage, entering.clone(), labels)
            rows.append(compute_row)
            return entering, scaled(loss, 1 / self._lanes.global_batch)
        with self._task.autocast():
            leaving: Tensor = HandedOver.apply(stage(entering.clone()))  # pyright: ignore
        self._hand_over(self._onward, leaving.detach(), self._ranks.rank + 1)
        return entering, leaving

    def _hand_over(self, messages: Messages, value: Tensor, rank: int) -> None:
        """Send a lane, and where its random draws stand."""
        messages.send(value, rank)
        messages.send(draws(self._ranks.device), rank)

    def _take_over(self, messages: Messages, rank: int) -> Tensor:
        """Receive a lane; dropout goes on where the stage before has stopped."""
        value = messages.receive(rank)
        set_draws(messages.receive(rank), self._ranks.device)
        return value

    def _differentiate(self, entering: Tensor, leaving: Tensor) -> Tensor:
        """One lane's backward through this stage; returns the gradient of its parameters as one flat tensor."""
        gradient = None if self._is_last else self._back.receive(self._ranks.rank + 1)
        self._ranks.heartbeat.computing()
        wanted = self._own if self._is_first else [entering, *self._own]
        found = list(torch.autograd.grad(leaving, wanted, gradient, materialize_grads=True)) if wanted else []
        if not self._is_first:
            self._back.send(found.pop(0), self._ranks.rank - 1)
        return flat(found, self._own) if self._own else torch.empty(0)

    def _set_buffers(self, sums: list[TreeNode[Tensor]], last: dict[str, Tensor]) -> None:
        """Floating-point buffers become the mean over lanes; every rank gets those of all stages: whoever saves needs them."""
        if sums[0][2].numel():
            set_floating(self._stage.buffers(), self._reduce(sums) / self._lanes.count)
        for name, buffer in self._stage.named_buffers():
            if not buffer.is_floating_point():
                buffer.copy_(last[name])
        for (owner, _), some in self._buffers.items():
            everyone = torch.cat([one.flatten() for one in some])
            dist.broadcast(everyone, owner)
            for one, value in zip(some, everyone.split([one.numel() for one in some]), strict=True):
                one.copy_(value.view_as(one))

    def _forward(self, images: Tensor) -> Tensor:
        """The whole model, on images of every rank's own; all ranks call it at once."""
        rank, entering, logits = self._ranks.rank, images, images
        if not self._is_first:
            self._hand_over(self._back, images, self._first)
        for source in range(self._first, self._last + 1):
            if not self._is_first:
                entering = self._take_over(self._onward, rank - 1)
            elif source != rank:
                entering = self._take_over(self._back, source)
            leaving: Tensor = self._stage(entering)
            if not self._is_last:
                self._hand_over(self._onward, leaving, rank + 1)
            elif source != rank:
                self._back.send(leaving, source)
            else:
                logits = leaving
        if not self._is_last:
            logits = self._back.receive(self._last)
        self._onward.wait()
        self._back.wait()
        return logits

    def part(self, name: str, whole: Tensor) -> Tensor:
        """All of it on the rank of its stage, nothing of it elsewhere."""
        return whole if self._owners[name] == self._index else whole.new_empty(0)

    def counts(self, name: str) -> bool:
        """The first copy's ranks."""
        return self._first == 0


class HandedOver(torch.autograd.Function):
    """Gives autograd a gradient of its own, to which it adds others in place, with its strides, as within a whole model.

    What a caller of autograd.grad passes it also holds, and torch adds in place only to what nobody else holds (2.14, input_buffer.cpp).
    """

    @staticmethod
    def forward(ctx: Any, leaving: Tensor) -> Tensor:
        return leaving.view_as(leaving)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return gradient.clone()


def owners(model: nn.Module, stages: list[nn.Module]) -> dict[str, int]:
    """Which rank's stage has a parameter or a buffer; what no stage uses is rank 0's."""
    found = {id(one): rank for rank, stage in enumerate(stages) for one in [*stage.parameters(), *stage.buffers()]}
    return {name: found.get(id(one), 0) for name, one in [*model.named_parameters(), *model.named_buffers()]}
