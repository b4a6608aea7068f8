"""A model's buffers (BatchNorm's statistics) over the lanes of a step."""

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.parallel.lanes import Lanes, TreeNode, push
from pipeline.parallel.ordered import OrderedSum, Reduction, add


class LaneBuffers:
    """A model's buffers in a step: each lane starts from the same ones; floating-point ones become the mean over lanes.

    Modules that are not in training, as frozen ones, change none.
    """

    def __init__(self, model: nn.Module, lanes: Lanes, reduction: Reduction | None = None):
        # Of one type each, so that a device copies a list in one launch.
        by_type: dict[torch.dtype, list[Tensor]] = {}
        found = changing(model)
        for buffer in found:
            by_type.setdefault(buffer.dtype, []).append(buffer)
        self._lists = list(by_type.values())
        self._floating = [buffer for buffer in found if buffer.is_floating_point()]
        self._sum = reduction or OrderedSum(lanes)
        self._lanes = lanes
        self._before: list[list[Tensor]] = []
        self._stack: list[TreeNode[Tensor]] = []
        self._under_way: Any = None

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """In the end all are what they were."""
        before = [[buffer.clone() for buffer in buffers] for buffers in self._lists]
        yield
        for buffers, values in zip(self._lists, before, strict=True):
            torch._foreach_copy_(buffers, values)  # pyright: ignore

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
        own = floating(self._floating)
        push(self._stack, (lane, 1, own), add)
        if lane == self._lanes.own[-1]:
            self._under_way = self._sum.scatter(self._stack, own)

    def finish(self) -> None:
        """Set the floating-point buffers to the mean over all lanes; whole numbers are those of one lane, the same in each."""
        if not self._floating:
            return
        self._sum.advance(self._under_way)
        mean = self._sum.result(self._under_way) / self._lanes.count
        set_floating(self._floating, mean)


def changing(model: nn.Module) -> list[Tensor]:
    """The buffers that a training may change."""
    return list(dict.fromkeys(buffer for module in model.modules() if module.training for buffer in module.buffers(recurse=False)))


def floating(buffers: Iterable[Tensor]) -> Tensor:
    """The floating-point ones as one flat tensor."""
    found = [one.flatten() for one in buffers if one.is_floating_point()]
    return torch.cat(found) if found else torch.empty(0)


def set_floating(buffers: Iterable[Tensor], values: Tensor) -> None:
    """Set them to the values of one flat tensor."""
    found = [one for one in buffers if one.is_floating_point()]
    if found:
        pieces = values.split([one.numel() for one in found])
        torch._foreach_copy_(found, [piece.view_as(one) for piece, one in zip(pieces, found, strict=True)])  # pyright: ignore
