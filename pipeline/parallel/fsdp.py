"""FSDP (fully_shard): every rank holds a share of each parameter and of the optimizer, and gathers a block's weights when it needs them.

Under the ordered reduction FSDP's reduce-scatter is our own: the same tree over the lanes as under DDP, and so the same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.nn import Parameter
from torch.optim import Optimizer

from pipeline.config import ConfigError, Dist
from pipeline.parallel import Strategy, ddp
from pipeline.parallel.lane_buffers import LaneBuffers
from pipeline.parallel.lanes import ComputeRow, Lanes, Task, Totals, TreeNode, first_weights, push, scaled, shapes
from pipeline.parallel.layouts import keep_layouts
from pipeline.parallel.mesh import groups
from pipeline.parallel.ordered import OrderedSum, add
from pipeline.parallel.remainders import Remainders, remainder, vector_elements
from pipeline.ranks import Ranks


def build(task: Task, lanes: Lanes, ranks: Ranks, settings: Dist) -> Strategy:
    """FSDP; alone, a rank has nobody to share with."""
    if len(set(lanes.per_rank)) > 1:
        raise ConfigError(f"dist.strategy: fsdp computes in step, and ranks own unequal numbers of lanes ({lanes.per_rank}); set ddp")
    if ranks.size == settings.replicas:
        return ddp.build(task, lanes, ranks, settings)
    return Fsdp(task, lanes, ranks, settings)


class Fsdp:
    """One lane after another, on all ranks in step: each block's weights are gathered when it computes.

    Between steps a rank has its shares alone. Within a step autograd keeps what was made of the weights (another type, another memory
    order), and with several lanes a rank their gradients are kept whole.
    """

    sharded = True

    def __init__(self, task: Task, lanes: Lanes, ranks: Ranks, settings: Dist):
        self._ordered = ordered = settings.reduction == "ordered"
        self._task, self._lanes, self._ranks, self.reads = task, lanes, ranks, lanes.own
        self._shares = ranks.size // settings.replicas
        model: Any = task.model
        on_cpu = ordered and ranks.device.type == "cpu"
        remainders = {name: self.part(name, remainder(one)).clone() for name, one in model.named_parameters() if on_cpu}
        keep_layouts(model)
        # FSDP takes plain memory order alone.
        model.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
        first_weights(model)
        self.shapes = shapes(model)
        copy, peers = groups(ranks, settings)
        mesh = DeviceMesh.from_group(copy, ranks.device.type)
        self._sums: list[OrderedReduceScatter] = []
        names = {part: name for name, part in model.named_modules()}
        for block in [*blocks(model), model]:
            name = names[block]
            # The root too: weights that it kept would miss an update.
            part = fully_shard(block, mesh=mesh, reshard_after_forward=True)
            # The loss is divided already.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_custom_all_gather(Gather(ranks))
            if ordered:
                self._sums.append(OrderedReduceScatter(lanes, ranks, self._shares, name))
            part.set_custom_reduce_scatter(self._sums[-1] if ordered else Scatter(ranks, peers))
        self._model: FSDPModule = model
        self._shared: dict[str, Any] = dict(model.named_parameters())
        # The same memory: what the optimizer does to these, it does to FSDP's.
        self.parameters = {name: Parameter(one.detach().to_local(), one.requires_grad) for name, one in self._shared.items()}
        self._remainders = [
            (self.parameters[name], places, self._shared[name].numel() % vector_elements()) for name, places in remainders.items()
        ]
        self._buffers = LaneBuffers(model, lanes)

    def follow(self, optimizer: Optimizer) -> None:
        """Let each element's update have the bits that it has in the whole tensor's."""
        Remainders(self._remainders, optimizer)
        del self._remainders

    def backward(self, step: int) -> Totals:
        """Gradients of the mean loss over the global batch, and the step's totals."""
        rows: list[ComputeRow] = []
        for one in self._sums:
            one.start()
        self._drop_gradients()
        self._buffers.start()
        self._ranks.heartbeat.computing(step)
        for lane in self._lanes.own:
            last = lane == self._lanes.own[-1]
            self._buffers.before_lane(lane)
            self._ranks.heartbeat.computing()
            for one in self._sums:
                one.lane = lane
            if self._ordered:
                # What FSDP adds up for earlier lanes is nothing; their gradients are kept by the sums.
                self._drop_gradients()
            else:
                self._model.set_requires_gradient_sync(last)
            loss, compute_row = self._task.forward(self._task.model, step, lane)
            self._buffers.after_lane(lane)
            scaled(loss, 1 / self._lanes.global_batch).backward()  # pyright: ignore[reportUnknownMemberType]
            rows.append(compute_row)
        for one in self._sums:
            one.finish()
        for name, parameter in self.parameters.items():
            gradient = self._shared[name].grad
            if gradient is None and parameter.requires_grad:
                raise unused(name)
            parameter.grad = None if gradient is None else gradient.to_local()
        self._buffers.finish()
        return Totals(rows, self._lanes, self._ranks)

    def _drop_gradients(self) -> None:
        for one in [*self._shared.values(), *self.parameters.values()]:
            one.grad = None

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows: as many as every other's, but at the end."""
        rows, index = -(-len(whole) // self._shares), self._ranks.rank % self._shares
        return whole[index * rows : (index + 1) * rows]

    def counts(self, name: str) -> bool:
        """The first copy's ranks."""
        return self._ranks.rank < self._shares


def unused(name: str) -> ConfigError:
    """The error for what has no gradient: FSDP brings those of a whole block together."""
    what = "took no part in a lane's loss"
    return ConfigError(f"model: {name} {what}; set dist.strategy: ddp and find_unused_parameters: true, or remove it")


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's parts that are gathered at once: large ones are cut into their parts, so that none is much of the model."""

    def size(part: nn.Module) -> int:
        return sum(one.numel() for one in part.parameters())

    def cut(part: nn.Module) -> list[nn.Module]:
        inner = [one for child in part.children() for one in cut(child)] if 4 * size(part) > size(model) or not callable_(part) else []
        return [*inner, *([part] if size(part) and callable_(part) else [])]

    return [one for child in model.children() for one in cut(child)]


def callable_(part: nn.Module) -> bool:
    """False for lists of modules, which nobody calls."""
    return not isinstance(part, nn.ModuleList | nn.ModuleDict)


class Gather(AllGather):
    """torch's own, and a word to the watchdog that this rank waits for the others."""

    def __init__(self, ranks: Ranks):
        self._heartbeat = ranks.heartbeat

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Fresh memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: "dist.ProcessGroup", async_op: bool = False) -> Any:
        """All-gather."""
        self._heartbeat.waiting()
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        self._heartbeat.computing()
        return work


class Scatter(ReduceScatter):
    """torch's own, with the same word; then the sum over the other copies of the model."""

    def __init__(self, ranks: Ranks, peers: "dist.ProcessGroup | None" = None):
        self._heartbeat, self._peers = ranks.heartbeat, peers

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Fresh memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: "dist.ProcessGroup", op: Any, async_op: bool = False) -> Any:
        """Reduce-scatter."""
        self._heartbeat.waiting()
        work = dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)
        if self._peers is not None:
            assert work is None
            dist.all_reduce(output_tensor, op, self._peers)
        self._heartbeat.computing()
        return work


class OrderedReduceScatter(Scatter):
    """One block's gradients: those of earlier lanes are kept, and with the last one's this rank's share is summed over all lanes."""

    def __init__(self, lanes: Lanes, ranks: Ranks, slices: int, name: str):
        super().__init__(ranks)
        # What is not in a block of its own is the root's.
        self._name = name or "a layer outside of all blocks"
        self._own, self._sum = lanes.own, OrderedSum(lanes, slices=slices)
        self.start()

    def start(self) -> None:
        """A step begins."""
        self._seen: list[int] = []
        self._stack: list[TreeNode[Tensor]] = []
        self.lane = -1

    def finish(self) -> None:
        """A step ends: a block is part of all lanes or of none."""
        if self._seen not in ([], list(self._own)):
            raise unused(self._name)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        """Take the gradients of a lane, cut for all ranks; the output holds something after the last one."""
        self._seen.append(self.lane)
        if input_tensor.is_cuda:
            # It is kept here longer than FSDP keeps it, and read on this stream.
            input_tensor.record_stream(torch.cuda.current_stream(input_tensor.device))
        if self._stack and self._stack[-1][2].shape != input_tensor.shape:
            raise unused(f"a parameter of {self._name}")
        push(self._stack, (self.lane, 1, input_tensor), add)
        if self.lane != self._own[-1]:
            return
        self._heartbeat.waiting()
        output_tensor.copy_(self._sum.share(self._sum.scatter(self._stack, input_tensor)))
        self._stack = []
        self._heartbeat.computing()
