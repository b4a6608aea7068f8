"""The ordered reduction: lanes summed in one fixed tree, so the result does not depend on who owns them. No collective adds."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn import Parameter

from pipeline.collectives import wait
from pipeline.parallel.lanes import Lanes, TreeNode, fold, maximal_nodes, push
from pipeline.parallel.layouts import flat, views
from pipeline.ranks import Ranks


def add(left: Tensor, right: Tensor) -> Tensor:
    """left + right, in the place of left."""
    return left.add_(right)


def add_lists(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """The same for many tensors."""
    torch._foreach_add_(left, right)  # pyright: ignore
    return left


@dataclass
class Sum:
    """A sum under way: slices of all ranks' nodes are on their way here, or the finished slices to `whole`, and from there to `out`."""

    out: Tensor
    slices: list[Tensor]
    work: Any
    whole: Tensor | None = None

    def wait(self) -> None:
        """Wait for what was sent last; alone, nothing is sent."""
        if self.work is not None:
            wait(self.work)


class Reduction(Protocol):
    """Sums flat tensors over all lanes, in moves that can be overlapped with other work."""

    moves: int

    def memory_for(self, own: Tensor) -> Tensor:
        """Return where to make the last node of the next `scatter`, which is of this size: `own`, or memory with old values in it.

        It is other memory only where this rank has one node.
        """
        ...

    def scatter(self, stack: list[TreeNode[Tensor]], out: Tensor) -> Any:
        """Make the first move with this rank's nodes; the sum will be in `out`."""
        ...

    def advance(self, under_way: Any) -> None:
        """Make the next move; after the last one there is none."""
        ...

    def result(self, under_way: Any) -> Tensor:
        """Return the sum, once all moves are made."""
        ...


class OrderedSum:
    """Sums flat tensors over all lanes of a group's ranks: scatter, then gather.

    Ranks get a slice each, or, where there are fewer slices, rank r the one of r modulo their number.
    """

    moves = 2

    def __init__(self, lanes: Lanes, group: "dist.ProcessGroup | None" = None, slices: int | None = None):
        self._size, self._group = len(lanes.per_rank), group
        self._slices = slices or self._size
        self._nodes = [list(maximal_nodes(lanes.of(rank))) for rank in range(self._size)]

    def memory_for(self, own: Tensor) -> Tensor:
        """Messages are sent from anywhere."""
        return own

    def scatter(self, stack: list[TreeNode[Tensor]], out: Tensor) -> Sum:
        """Start to send every rank its slice of this rank's nodes; the sum will be in `out`, which may be a node itself."""
        values = [value for _, _, value in stack]
        if self._size == 1:
            return Sum(out, values, None)
        piece = -(-out.numel() // self._slices)
        send = values[0] if len(values) == 1 and piece * self._slices == out.numel() else _sliced(values, self._slices, piece)
        if self._slices < self._size:
            send = send.repeat(self._size // self._slices)
        counts = [len(nodes) for nodes in self._nodes]
        received = torch.empty(piece * sum(counts), dtype=out.dtype, device=out.device)
        # Without sizes where they are equal: a backend may have a faster way for that.
        equal = len(set(counts)) == 1
        to_here, from_here = (None, None) if equal else ([piece * count for count in counts], [piece * len(stack)] * self._size)
        work = dist.all_to_all_single(received, send, to_here, from_here, self._group, async_op=True)
        return Sum(out, list(received.split(piece)), work)

    def share(self, under_way: Sum) -> Tensor:
        """Finish the tree on the own slice."""
        under_way.wait()
        slices = iter(under_way.slices)
        tree: list[TreeNode[Tensor]] = []
        for nodes in self._nodes:
            for start, size in nodes:
                push(tree, (start, size, next(slices)), add)
        return fold(tree, add)

    def advance(self, under_way: Sum) -> None:
        """Gather, unless that was done."""
        if under_way.whole is None:
            self.gather(under_way)

    def gather(self, under_way: Sum) -> None:
        """Finish the own slice and start to collect the slices of all ranks."""
        self.collect(under_way, self.share(under_way))

    def collect(self, under_way: Sum, own: Tensor) -> None:
        """Start to collect the slices of all ranks, of which this is the own one."""
        if self._size == 1:
            under_way.whole = own
            return
        whole, out = own.numel() * self._size, under_way.out
        under_way.whole = out if whole == out.numel() else torch.empty(whole, dtype=out.dtype, device=out.device)
        under_way.work = dist.all_gather_single(under_way.whole, own, self._group, async_op=True)

    def result(self, under_way: Sum) -> Tensor:
        """The sum over all lanes, in `out`."""
        under_way.wait()
        out, whole = under_way.out, under_way.whole
        assert whole is not None
        return out if whole is out else out.copy_(whole[: out.numel()])


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

    def __init__(self, lanes: Lanes, ranks: Ranks, parameters: list[Parameter], reduction: Reduction | None = None):
        self._sum = reduction or OrderedSum(lanes)
        self._lanes, self._device, self._pulse = lanes, ranks.device, ranks.heartbeat
        self._parameters = parameters
        self._index: dict[Tensor, int] = {parameter: index for index, parameter in enumerate(parameters)}
        self._stack: list[TreeNode[list[Tensor]]] = []
        # How many lanes the last node has, whose backward meets the other ranks.
        self.last_lanes = 1
        self._under_way: list[tuple[Any, Future[Tensor]]] = []
        # What the stream below reads, until the next step: this one's end waits for it.
        self._read: list[Tensor] = []
        # Backward's own stream would wait for the network.
        self._stream = torch.cuda.Stream(ranks.device, priority=-1) if ranks.device.type == "cuda" and ranks.size > 1 else None

    def keep(self, first: int, lanes: int = 1) -> None:
        """Take the gradients of one lane, or of a node of so many, off the parameters."""
        gradients: list[Tensor] = []
        for parameter in self._parameters:
            assert parameter.grad is not None, "a parameter took no part in the loss"
            gradients.append(parameter.grad)
            parameter.grad = None
        push(self._stack, (first, lanes, gradients), add_lists)

    def hook(self, _: object, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: the sum of a bucket over all lanes."""
        # DDP copies the result into the bucket unless it is there already.
        own = bucket.buffer()
        stack = self._nodes(own, bucket.parameters())
        with self._beside_backward([value for _, _, value in stack]):
            under_way = self._sum.scatter(stack, own)
            future: Future[Tensor] = Future(devices=[self._device] if self._device.type == "cuda" else None)
            if self._under_way:
                self._pulse.waiting()
                self._advance()
                self._pulse.computing()
            self._under_way.append((under_way, future))
            if bucket.is_last():
                self._pulse.waiting()
                self._finish()
        return future

    def _nodes(self, own: Tensor, owners: list[Tensor]) -> list[TreeNode[Tensor]]:
        """This rank's nodes of a bucket: the one with the last lane in it is added up where the sum wants it, the others are made flat."""
        stack = [(start, size, [gradients[self._index[owner]] for owner in owners]) for start, size, gradients in self._stack]
        last = self._lanes.own.stop - self.last_lanes, self.last_lanes
        node = self._sum.memory_for(own) if stack else own
        parts = views(node, owners) if stack else []

        def add_up(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
            # Either way round a sum has the same bits.
            if node is own:
                return add_lists(right, left)
            return [torch.add(one, other, out=out) for one, other, out in zip(right, left, parts, strict=True)]

        push(stack, (*last, views(own, owners) if stack else []), add_up)
        *kept, (first, size, _) = stack
        return [*((start, size, flat(gradients, owners)) for start, size, gradients in kept), (first, size, node)]

    @contextmanager
    def _beside_backward(self, values: list[Tensor]) -> Generator[None]:
        """On a GPU, queue what follows on a stream of its own, behind what made these values."""
        if self._stream is None:
            yield
            return
        if not self._under_way:
            self._read.clear()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # Kept rather than recorded: how much memory a step takes is then no matter of how far the host is ahead.
        self._read += values
        with torch.cuda.stream(self._stream):
            yield

    def _advance(self) -> None:
        for under_way, _ in self._under_way:
            self._sum.advance(under_way)

    def _finish(self) -> None:
        for _ in range(1, self._sum.moves):
            self._advance()
        for under_way, future in self._under_way:
            future.set_result(self._sum.result(under_way))
        self._under_way.clear()
        self._stack.clear()
