"""Divergence: from the first non-finite gradient on no update touches the weights, on any rank."""

import json
import math
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pipeline.config import MachineError
from pipeline.files import atomic_write
from pipeline.parallel.lanes import Lanes, Task
from pipeline.ranks import Ranks
from pipeline.training.state import MODEL, State

CURE = "lower train.learning_rate or raise train.warmup_epochs"


class Diverged(RuntimeError):
    """A gradient, a weight or a figure is non-finite: exit 5."""

    exit_code = 5


class NonFiniteGuard:
    """Checks every gradient after the reduction, when it is equal on all ranks, so that all ranks decide alike.

    Nothing waits for the answer. It stays on the device, where fused optimizers skip their update if it is set, and is read when
    something is logged, validated or saved.
    """

    def __init__(self, state: State, ranks: Ranks, explain: Callable[[int], str]):
        self._state, self._ranks, self._explain = state, ranks, explain
        parameters: list[Parameter] = [one for group in state.optimizer.param_groups for one in group["params"]]
        # A rank may have no part of a small one.
        self._parameters = [one for one in parameters if one.numel()]
        device = parameters[0].device
        self._bad = torch.zeros((), device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._first = 0
        # Fused optimizers read this attribute; GradScaler sets it in the same way.
        state.optimizer.found_inf = self._bad  # pyright: ignore[reportAttributeAccessIssue]

    def start(self, step: int) -> None:
        """Count steps from this one."""
        self._first = step
        self._good_steps.zero_()

    @property
    def marks(self) -> dict[str, float]:
        """What a rank must know of earlier steps."""
        return {"first": self._first, "good_steps": self._good_steps.item(), "bad": self._bad.item()}

    def take(self, marks: dict[str, float]) -> None:
        """Know what another rank knows."""
        self._first = int(marks["first"])
        self._good_steps.fill_(int(marks["good_steps"]))
        self._bad.fill_(marks["bad"])

    def observe(self) -> None:
        """Record whether a gradient is non-finite; call it between backward and the update."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if runs_ahead(self._bad) and gradients:
            self._bad.copy_(torch.maximum(self._bad, (~each_finite(gradients)).any().float()))
        elif not all(map(is_finite, whole_buckets(gradients))):
            self._bad.fill_(1)
        if self._state.sharded:
            self._ranks.maximum(self._bad)
        self._good_steps += self._bad == 0

    def raise_if_diverged(self) -> None:
        """Raise Diverged, on every rank, if a gradient was non-finite; MachineError, on this rank alone, if kernels may have changed."""
        check_gpus()
        if self._bad.item():
            step = self._first + int(self._good_steps.item())
            found = f"the gradient of step {step} is not finite, and no weight was updated since"
            raise Diverged(f"training diverged: {found}; {self._explain(step)}; {CURE}")

    def check(self, step: int) -> None:
        """Raise Diverged, on every rank, if a weight or an optimizer state is non-finite."""
        self.raise_if_diverged()
        kept = {name.removeprefix(MODEL): part for name, _, part in self._state.parts() if part.is_floating_point() and part.numel()}
        tensors = list(kept.values())
        # One look at a GPU, however many there are.
        good = each_finite(tensors).tolist() if runs_ahead(self._bad) and tensors else map(is_finite, tensors)
        bad = [name for name, one in zip(kept, good, strict=True) if not one]
        # Always asked: a rank whose memory lost a bit must not leave the others in a save.
        self._ranks.heartbeat.waiting()
        if self._ranks.start_logical_or(bool(bad))():
            where = bad[0] if bad else "another rank"
            raise Diverged(f"training diverged: {where} holds NaN or infinity after step {step}; {CURE}")


def runs_ahead(one: Tensor) -> bool:
    """Whether the host goes on while a tensor is computed: reading it would wait."""
    return one.is_cuda


def each_finite(tensors: list[Tensor]) -> Tensor:
    """Whether every value of a tensor is finite, for each of at least one tensor: in one launch, and on their device."""
    return torch.stack(torch._foreach_norm(tensors, math.inf)).isfinite()  # pyright: ignore


def is_finite(one: Tensor) -> bool:
    """The same of one tensor on a CPU, where that norm takes ten times as long. The smallest and the largest value are NaN if one is."""
    # In the order of its memory: in another, as of channels-last weights, it takes three to four times as long.
    smallest, largest = torch.aminmax(one.permute(sorted(range(one.ndim), key=one.stride, reverse=True)))
    return math.isfinite(smallest.item()) and math.isfinite(largest.item())


def whole_buckets(gradients: list[Tensor]) -> list[Tensor]:
    """Gradients that fill their memory, as in a bucket of DDP's, as one tensor: one look takes less time than many."""
    buckets: dict[int, list[Tensor]] = {}
    for one in gradients:
        buckets.setdefault(one.untyped_storage().data_ptr(), []).append(one)
    found: list[Tensor] = []
    for some in buckets.values():
        memory = some[0].untyped_storage()
        filled = sum(one.nbytes for one in some) == memory.nbytes()
        found += [torch.empty(0, dtype=some[0].dtype).set_(memory)] if filled else some
    return found


def check_gpus() -> None:
    """Raise MachineError if a GPU of this process was too short of memory for a kernel; call it before figures or weights are kept."""
    check_kernels(torch.cuda.memory_stats())
    # One process may use several.
    for index in range(torch.cuda.device_count()):
        check_kernels(torch.cuda.memory_stats(index))


def check_gpu_libraries() -> None:
    """Raise MachineError unless this GPU computes with what was installed, and tells when its memory is too short."""
    if (allocator := torch.cuda.get_allocator_backend()) != "native":
        # It does not count the allocations that failed, after which cuDNN runs another kernel.
        raise MachineError(
            f"the GPU's allocator is {allocator}, which hides that memory was too short; take `backend` out of PYTORCH_ALLOC_CONF"
        )
    check_cudnn()


def check_cudnn() -> None:
    """Raise MachineError if another cuDNN is loaded than the package that is installed, whose version the fingerprint has."""
    try:
        installed = version(f"nvidia-cudnn-cu{str(torch.version.cuda).partition('.')[0]}")
    except PackageNotFoundError:
        # Installed under another name, or the launcher would have refused.
        return
    try:
        number = torch.backends.cudnn.version() or 0
    except RuntimeError as error:
        # One that does not go with this torch at all.
        raise MachineError(str(error).splitlines()[0]) from None
    loaded = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    if loaded.split(".") != installed.split(".")[:3]:
        raise MachineError(
            f"cuDNN {loaded} is loaded, and {installed} is installed: its kernels would compute other bits; take it out of LD_LIBRARY_PATH"
        )


def check_kernels(memory_stats: Mapping[str, Any]) -> None:
    """Raise MachineError if an allocation on the GPU failed and went unreported.

    cuDNN then runs another kernel, one that needs less workspace and rounds differently, without a word (torch 2.14, Conv_v8.cpp).
    """
    if memory_stats.get("num_ooms", 0):
        raise MachineError(
            "the GPU's memory was too short for a kernel's workspace, and another kernel computes other bits; nothing of it was kept; "
            "free the GPU, or compute fewer images at once: raise dist.lanes, or under reduction: native lower the batch"
        )


def finite(figures: dict[str, float], step: int) -> dict[str, float]:
    """Return the figures, or raise Diverged, on every rank, if one is non-finite."""
    for name, value in figures.items():
        if not math.isfinite(value):
            raise Diverged(f"training diverged: {name} is {value} at step {step}; {CURE}")
    return figures


def write_diagnosis(path: Path, task: Task, lanes: Lanes, group: Ranks, samples: Callable[[int, int], Tensor], step: int) -> str:
    """Write the samples of a step and the loss of each lane; every rank must call it, rank 0 writes. Returns a line about it."""
    # Ranks of a pipeline compute together, each as often as any other.
    asked = [*lanes.own, *[lanes.own[0]] * (max(lanes.per_rank) - len(lanes.own))]
    with torch.no_grad():
        rows = torch.stack([task.forward(task.model, step, lane)[1]()[:1] for lane in asked])
    losses = group.gather_rows(rows[: len(lanes.own)], lanes.per_rank).flatten().tolist()
    bad = [lane for lane, loss in enumerate(losses) if not math.isfinite(loss)]
    found = [{"lane": lane, "loss": repr(loss), "samples": samples(step, lane).tolist()} for lane, loss in enumerate(losses)]
    values = {"step": step, "lanes_without_a_loss": bad, "lanes": found}

    def write() -> str:
        try:
            atomic_write(path, (json.dumps(values) + "\n").encode())
        except OSError as error:
            # That it diverged is to be said also where nothing can be written any more.
            return f"not written ({error.strerror})"
        return str(path)

    where = group.on_rank_zero(write, str(path))
    return f"the loss of lanes {bad} is non-finite, their samples: {where}" if bad else f"its samples: {where}"
