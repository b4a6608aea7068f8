"""Divergence: from the first gradient on that is no number, no update touches the weights, on all ranks alike."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.files import atomic_write
from pipeline.parallel.lanes import Lanes, Task
from pipeline.ranks import Ranks

CURE = "lower train.learning_rate or raise train.warmup_epochs"


class Diverged(RuntimeError):
    """Training has left the numbers: exit 5."""

    exit_code = 5


class NonFiniteGuard:
    """Looks at every gradient after the reduction, when it is the same on all ranks: what one rank decides, all decide.

    Nobody waits for the answer. It stays on the device, where the fused optimizers skip their update by it, and it is read
    when something is logged, validated or saved.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, explain: Callable[[int], str]):
        self._model, self._optimizer, self._explain = model, optimizer, explain
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        device = self._parameters[0].device
        self._bad = torch.zeros((), device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._first = 0
        # The name under which fused optimizers look for it.
        optimizer.found_inf = self._bad  # pyright: ignore[reportAttributeAccessIssue]

    def start(self, step: int) -> None:
        """Count from here."""
        self._first = step
        self._good_steps.zero_()

    def look(self) -> None:
        """After the gradients, before the update."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        largest = torch.stack(torch._foreach_norm(gradients, math.inf))  # pyright: ignore
        self._bad.copy_(torch.maximum(self._bad, (~largest.isfinite()).any().float()))
        self._good_steps += self._bad == 0

    def check(self) -> None:
        """Diverged, on all ranks at once, where a gradient was no number."""
        if self._bad.item():
            step = self._first + int(self._good_steps.item())
            found = f"the gradient of step {step} is not finite, and no weight was updated since"
            raise Diverged(f"training diverged: {found}; {self._explain(step)}; {CURE}")

    def sound(self, step: int) -> nn.Module:
        """The model; Diverged, on all ranks alike, where something is no number that is about to be kept."""
        self.check()
        kept = dict(self._model.state_dict().items())
        for index, state in self._optimizer.state_dict()["state"].items():
            kept |= {f"optimizer.{index}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        for name, tensor in kept.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise Diverged(f"training diverged: {name} holds NaN or infinity after step {step}; {CURE}")
        return self._model


def finite(figures: dict[str, float], step: int) -> dict[str, float]:
    """The same figures; Diverged, on all ranks alike, where one is no number."""
    for name, value in figures.items():
        if not math.isfinite(value):
            raise Diverged(f"training diverged: {name} is {value} at step {step}; {CURE}")
    return figures


def write_down(path: Path, task: Task, lanes: Lanes, group: Ranks, samples: Callable[[int, int], Tensor], step: int) -> str:
    """The samples of a step, and in which lanes the loss was no number; every rank must call it, rank 0 writes."""
    with torch.no_grad():
        rows = torch.stack([task.forward(task.model, step, lane)[1][:1] for lane in lanes.own])
    losses = group.gather_rows(rows, lanes.per_rank).flatten().tolist()
    bad = [lane for lane, loss in enumerate(losses) if not math.isfinite(loss)]
    found = [{"lane": lane, "loss": repr(loss), "samples": samples(step, lane).tolist()} for lane, loss in enumerate(losses)]
    values = {"step": step, "lanes_without_a_loss": bad, "lanes": found}
    group.only_first(lambda: atomic_write(path, (json.dumps(values) + "\n").encode()), None)
    return f"the loss of lanes {bad} is no number, their samples: {path}" if bad else f"its samples: {path}"
