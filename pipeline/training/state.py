"""A training's state by name: weights, buffers and the optimizer's tensors, whole, whichever part of them a rank holds."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.parallel import Holding
from pipeline.parallel.lanes import Replicated
from pipeline.training.average import Average
from pipeline.training.checkpoint_file import sha256_of

MODEL, OPTIMIZER, AVERAGE = "model.", "optimizer.", "average."


class State:
    """What a checkpoint holds: `model.fc.weight`, `optimizer.fc.weight.momentum_buffer`, and `average.fc.weight` if there is one."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, holding: Holding | None = None, ema_decay: float | None = None):
        self.model, self.optimizer = model, optimizer
        self._holding = holding or Replicated(model)
        self.sharded = self._holding.sharded
        self._parameters = self._holding.parameters
        self.counted = [one for name, one in self._parameters.items() if self._holding.counts(name)]
        own: dict[str, Tensor] = model.state_dict()
        saved_buffers = {name: one for name, one in model.named_buffers() if name in own}
        self.average = Average(self._parameters | saved_buffers, ema_decay)

    def parts(self) -> Iterator[tuple[str, str | None, Tensor]]:
        """Yield names and this rank's tensors, with the name of the parameter whose values they are or belong to, if any."""
        for name, value in self.model.state_dict().items():
            parameter = self._parameters.get(name)
            yield (MODEL + name, None, value) if parameter is None else (MODEL + name, name, parameter.detach())
        states: dict[Tensor, dict[str, Any]] = self.optimizer.state
        for name, parameter in self._parameters.items():
            for key, value in states.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{OPTIMIZER}{name}.{key}", name if key != "step" and value.shape == parameter.shape else None, value
        for name, value in self.average.parts.items():
            yield AVERAGE + name, name if name in self._parameters else None, value

    def whole(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield names that begin like this, and whole tensors; where ranks hold parts, every rank must take all of them."""
        for name, parameter, part in self.parts():
            if name.startswith(prefix):
                yield name, self._whole(parameter, part)

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights and buffers; every rank must call it."""
        return {name.removeprefix(MODEL): value for name, value in self.whole(MODEL)}

    def weights_sha256(self) -> str:
        """Return the digest of the whole weights and buffers; every rank must call it. No rank has all of them at once."""
        parts = sorted((part for part in self.parts() if part[0].startswith(MODEL)), key=lambda part: part[0])
        return sha256_of((name.removeprefix(MODEL), self._whole(parameter, part)) for name, parameter, part in parts)

    def _whole(self, parameter: str | None, part: Tensor) -> Tensor:
        return part if parameter is None else self._holding.whole(parameter, part)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take whole tensors, as `whole` yields them."""
        own: dict[str, Tensor] = self.model.state_dict()
        given = {name.removeprefix(MODEL): value for name, value in tensors.items() if name.startswith(MODEL)}
        if own.keys() != given.keys():
            raise RuntimeError(f"the checkpoint is of another model: {min(own.keys() ^ given.keys())} is not in both")
        with torch.no_grad():
            for name, value in given.items():
                self._take(name, self._parameters.get(name, own[name]), value)
            for name, value in self.average.parts.items():
                self._take(name, value, tensors[AVERAGE + name])
        self.optimizer.load_state_dict(
            {"state": self._optimizer_state(tensors), "param_groups": self.optimizer.state_dict()["param_groups"]}
        )

    def _take(self, name: str, part: Tensor, whole: Tensor) -> None:
        own = self._holding.part(name, whole) if name in self._parameters else whole
        if own.shape != part.shape:
            raise RuntimeError(f"the checkpoint is of another model: {name} has the shape {list(whole.shape)} there")
        part.copy_(own)

    def _optimizer_state(self, tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        """By the parameters' places in the optimizer, as its `load_state_dict` has it."""
        places = {
            parameter: index for index, parameter in enumerate(one for group in self.optimizer.param_groups for one in group["params"])
        }
        found: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith(OPTIMIZER):
                owner, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
                parameter = self._parameters[owner]
                # A count of steps is no part of a parameter.
                own = self._holding.part(owner, value) if value.ndim else value
                found.setdefault(places[parameter], {})[key] = _laid_out_like(parameter, own)
        return found


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """The same values in the parameter's memory order: fused optimizers walk both as flat memory."""
    if value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
