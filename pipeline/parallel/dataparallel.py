"""nn.DataParallel: one process and all GPUs that it sees, with a copy of the model and a thread for each of them.

As there, the weights are copied to every GPU in each step, and the first GPU takes the gradients. The batch is cut into lanes, whose
gradients are added up in the tree that `ddp` uses: the bits are the same. `dist.lanes_per_rank` says how many lanes each GPU takes:
the first one may get fewer, as it has more to do. Without GPUs the CPU takes all lanes.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock

import torch
from torch import Tensor

from pipeline.config import ConfigError, Dist
from pipeline.parallel.lane_buffers import floating, set_floating
from pipeline.parallel.lanes import ComputeRow, Lanes, Replicated, Task, Totals, TreeNode, fold, push
from pipeline.parallel.ordered import add
from pipeline.parallel.replicas import FlatTask, flat_task
from pipeline.ranks import Ranks


def build(task: Task, lanes: Lanes, ranks: Ranks, settings: Dist) -> Replicated:
    """All GPUs of this process; without any, its CPU."""
    if ranks.device.type == "cpu":
        return DataParallel(task, lanes, ranks, [ranks.device], [lanes.count])
    asked = settings.lanes_per_rank if isinstance(settings.lanes_per_rank, list) else None
    shares = shared_out(lanes.count, torch.cuda.device_count(), asked)
    return DataParallel(task, lanes, ranks, [torch.device("cuda", index) for index in range(len(shares))], shares)


def shared_out(lanes: int, gpus: int, asked: list[int] | None) -> list[int]:
    """How many lanes each GPU takes; no more GPUs than there are lanes."""
    if asked is not None and len(asked) > gpus:
        raise ConfigError(f"dist.lanes_per_rank: {asked}: dataparallel takes a number for each GPU, and here are {gpus}")
    whole, rest = divmod(lanes, min(gpus, lanes))
    return asked or [whole + (index < rest) for index in range(min(gpus, lanes))]


@dataclass(frozen=True)
class Copy:
    """The model on one device, and its lanes."""

    task: FlatTask
    device: torch.device
    own: range


@dataclass(frozen=True)
class Found:
    """What a device has found: for each lane what computes its row of totals, and the sums of gradients and floating-point buffers."""

    rows: list[ComputeRow]
    gradients: list[TreeNode[Tensor]]
    buffers: list[TreeNode[Tensor]]


class DataParallel(Replicated):
    """The copies compute at the same time; what they find is added up on the first device."""

    def __init__(self, task: Task, lanes: Lanes, ranks: Ranks, devices: list[torch.device], shares: list[int]):
        super().__init__(task.model)
        self._lanes, self._ranks, self.reads = lanes, ranks, lanes.own
        self._first, cut = flat_task(task, lanes), Lanes(shares, 0, lanes.global_batch)
        self._copies = [Copy(self._first, devices[0], cut.of(0))]
        for index, device in enumerate(devices[1:], 1):
            model = copy.deepcopy(task.model).to(device)
            own: list[Tensor] = [one for one in model.parameters() if one.requires_grad]
            weights = None if task.class_weights is None else task.class_weights.to(device)
            theirs = replace(task, model=model, class_weights=weights)
            self._copies.append(Copy(FlatTask(theirs, lanes.global_batch, own), device, cut.of(index)))
        # A new thread would compute a matrix product on all cores, and round differently (torch 2.14, oneDNN).
        self._threads = ThreadPoolExecutor(len(devices), initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))
        # One at a time.
        self._reading, self._computing = Lock(), Lock()

    def backward(self, step: int) -> Totals:
        """Gradients of the mean loss over the global batch, and the step's totals."""
        first = self._copies[0].device
        for parameter in self._first.parameters:
            parameter.grad = None
        self._ranks.heartbeat.computing(step)
        before = [one.clone() for one in self._first.task.model.buffers()]
        rows: list[ComputeRow] = []
        gradients: list[TreeNode[Tensor]] = []
        buffers: list[TreeNode[Tensor]] = []
        for found in self._threads.map(lambda one: self._compute(one, step, before), self._copies):
            rows += found.rows
            for stack, nodes in ((gradients, found.gradients), (buffers, found.buffers)):
                for start, size, value in nodes:
                    push(stack, (start, size, value.to(first)), add)
        for parameter, gradient in zip(self._first.parameters, self._first.views(fold(gradients, add)), strict=True):
            parameter.grad = gradient
        set_floating(self._first.task.model.buffers(), fold(buffers, add) / self._lanes.count)
        return Totals(rows, self._lanes, self._ranks)

    def _compute(self, one: Copy, step: int, before: list[Tensor]) -> Found:
        """All lanes of one device."""
        task, model, found = one.task.task, one.task.task.model, Found([], [], [])
        with torch.cuda.device(one.device) if one.device.type == "cuda" else nullcontext():
            if model is not self._first.task.model:
                for mine, value in zip(model.parameters(), self._first.task.model.parameters(), strict=True):
                    mine.detach().copy_(value.detach())
            for lane in one.own:
                for buffer, value in zip(model.buffers(), before, strict=True):
                    buffer.copy_(value)
                with self._reading:
                    self._ranks.heartbeat.computing()
                    images, labels = task.batch(step, lane)
                with self._alone(one.device, task):
                    task.seed_draws(step, lane, one.device)
                    compute_row, gradient = one.task.gradient(images.to(one.device), labels.to(one.device))
                found.rows.append(compute_row)
                push(found.gradients, (lane, 1, gradient), add)
                push(found.buffers, (lane, 1, floating(model.buffers())), add)
        return found

    def _alone(self, device: torch.device, task: Task) -> AbstractContextManager[object]:
        """CPUs have one generator for all threads, from which a model of the user's own may draw on a GPU too."""
        return self._computing if device.type == "cpu" or task.seeds_all else nullcontext()
