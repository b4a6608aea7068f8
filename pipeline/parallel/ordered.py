"""The ordered reduction: lanes summed in one fixed tree, so the result does not depend on who owns them. No collective adds."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn import Parameter

from pipeline.parallel.lanes import Lanes, TreeNode, fold, maximal_nodes, push
from pipeline.ranks import Ranks


def add(left: Tensor, right: Tensor) -> Tensor:
    """left + right, in the place of left."""
    return left.add_(right)


def add_lists(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """The same for many tensors."""
    torch._foreach_add_(left, right)  # pyright: ignore
    return left


@dataclass
class _Sum:
    """A sum under way: its slice is being sent, or its finished slices are being collected."""

    numel: int
    piece: int
    work: Any
    buffer: Tensor
    future: Future[Tensor] | None = None


class OrderedSum:
    """Sums flat tensors over all lanes of all ranks, in two moves that can be overlapped with other work."""

    def __init__(self, lanes: Lanes, ranks: Ranks):
        self._size = ranks.size
        self._nodes = [list(maximal_nodes(lanes.of(rank))) for rank in range(ranks.size)]

    def scatter(self, stack: list[TreeNode[Tensor]]) -> _Sum:
        """Start to send every rank its slice of this rank's nodes."""
        numel = stack[0][2].numel()
        piece = -(-numel // self._size)
        if len(stack) == 1 and piece * self._size == numel:
            send = stack[0][2]
        else:
            send = _sliced([value for _, _, value in stack], self._size, piece)
        sizes = [piece * len(nodes) for nodes in self._nodes]
        received = torch.empty(sum(sizes), dtype=send.dtype, device=send.device)
        work = dist.all_to_all_single(received, send, sizes, [piece * len(stack)] * self._size, async_op=True)
        return _Sum(numel, piece, work, received)

    def gather(self, under_way: _Sum) -> None:
        """Finish the tree on the own slice and start to collect the slices of all ranks."""
        under_way.work.wait()
        piece = under_way.piece
        slices = iter(under_way.buffer.split(piece))
        tree: list[TreeNode[Tensor]] = []
        for nodes in self._nodes:
            for start, size in nodes:
                push(tree, (start, size, next(slices)), add)
        whole = torch.empty(piece * self._size, dtype=under_way.buffer.dtype, device=under_way.buffer.device)
        under_way.work = dist.all_gather_single(whole, fold(tree, add), async_op=True)
        under_way.buffer = whole

    def result(self, under_way: _Sum) -> Tensor:
        """The sum over all lanes."""
        under_way.work.wait()
        return under_way.buffer[: under_way.numel]

    def __call__(self, stack: list[TreeNode[Tensor]]) -> Tensor:
        """All of it at once."""
        under_way = self.scatter(stack)
        self.gather(under_way)
        return self.result(under_way)


def _sliced(values: list[Tensor], ranks: int, piece: int) -> Tensor:
    """Flat tensors cut for all ranks: first every tensor's slice for rank 0, then for rank 1, and so on; zeros at the end."""
    out = torch.empty((ranks, len(values), piece), dtype=values[0].dtype, device=values[0].device)
    for index, value in enumerate(values):
        whole, rest = divmod(value.numel(), piece)
        out[:whole, index].copy_(value[: whole * piece].view(whole, piece))
        if whole < ranks:
            out[whole:, index].zero_()
            out[whole, index, :rest].copy_(value[whole * piece :])
    return out.view(-1)


class LaneGradients:
    """Gradients of this rank's lanes but the last, and the communication hook that meets the last one in DDP's buckets.

    A bucket is sent when its gradients are ready, and the bucket before it is finished meanwhile: the reduction runs beside
    the rest of backward. All ranks start the same collectives in the same order, which is the order of the buckets.
    """

    def __init__(self, lanes: Lanes, ranks: Ranks, parameters: list[Parameter]):
        self._sum = OrderedSum(lanes, ranks)
        self._lanes, self._device, self._pulse = lanes, ranks.device, ranks.heartbeat
        self._parameters = parameters
        self._index: dict[Tensor, int] = {parameter: index for index, parameter in enumerate(parameters)}
        self._stack: list[TreeNode[list[Tensor]]] = []
        self._under_way: list[_Sum] = []

    def keep(self, lane: int) -> None:
        """Take the gradients of one lane off the parameters."""
        gradients: list[Tensor] = []
        for parameter in self._parameters:
            assert parameter.grad is not None, "a parameter took no part in the loss"
            gradients.append(parameter.grad)
            parameter.grad = None
        push(self._stack, (lane, 1, gradients), add_lists)

    def hook(self, _: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: the sum of a bucket over all lanes."""
        owners = bucket.parameters()
        stack: list[TreeNode[Tensor]] = []
        for start, size, gradients in self._stack:
            stack.append((start, size, _flat([gradients[self._index[owner]] for owner in owners], owners)))
        push(stack, (self._lanes.own[-1], 1, bucket.buffer()), add)
        under_way = self._sum.scatter(stack)
        under_way.future = Future(devices=[self._device] if self._device.type == "cuda" else None)
        if self._under_way:
            self._pulse.waiting()
            self._sum.gather(self._under_way[-1])
            self._pulse.computing()
        self._under_way.append(under_way)
        if bucket.is_last():
            self._pulse.waiting()
            self._finish()
        return under_way.future

    def _finish(self) -> None:
        self._sum.gather(self._under_way[-1])
        for under_way in self._under_way:
            assert under_way.future is not None
            under_way.future.set_result(self._sum.result(under_way))
        self._under_way.clear()
        self._stack.clear()


def _flat(gradients: list[Tensor], owners: list[Tensor]) -> Tensor:
    """Gradients one behind the other, each in the memory order of its parameter, as DDP lays them out in a bucket.

    `bucket.gradients()` would not do: it shows the bytes of a channels-last gradient as if they were in plain order.
    """
    pieces = [
        (gradient if gradient.stride() == owner.stride() else torch.empty_like(owner).copy_(gradient)).as_strided((owner.numel(),), (1,))
        for gradient, owner in zip(gradients, owners, strict=True)
    ]
    return torch.cat(pieces)
