"""A training's state by name: weights, buffers and the optimizer's tensors, whole, whichever part of them a rank holds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.parallel import Holding
from pipeline.parallel.lanes import Replicated
from pipeline.ranks import Ranks
from pipeline.training.average import Average
from pipeline.training.checkpoint_file import sha256_of

MODEL, OPTIMIZER, AVERAGE = "model.", "optimizer.", "average."


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, and how many of its elements each rank has; None where every rank has all of it."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    per_rank: list[int] | None


class State:
    """What a checkpoint holds: `model.fc.weight`, `optimizer.fc.weight.momentum_buffer`, and `average.fc.weight` if there is one."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        holding: Holding | None = None,
        ranks: Ranks | None = None,
        ema_decay: float | None = None,
    ):
        self.model, self.optimizer = model, optimizer
        self._holding, self._ranks = holding or Replicated(model), ranks
        self.sharded = self._holding.sharded
        self._parameters = self._holding.parameters
        self.counted = [one for name, one in self._parameters.items() if self._holding.counts(name)]
        own: dict[str, Tensor] = model.state_dict()
        saved_buffers = {name: one for name, one in model.named_buffers() if name in own}
        self.average = Average(self._parameters | saved_buffers, ema_decay)

    @cached_property
    def _per_rank(self) -> dict[str, list[int]]:
        """How many elements of each parameter each rank gives to the whole; every rank must ask at once."""
        assert self._ranks is not None, "ranks that hold parts must know each other"
        own = [one.numel() if self._holding.counts(name) else 0 for name, one in self._parameters.items()]
        everyone = self._ranks.gather_rows(torch.tensor([own], device=self._ranks.device), [1] * self._ranks.size)
        return dict(zip(self._parameters, everyone.T.tolist(), strict=True))

    def entries(self) -> list[Entry]:
        """Return all that `whole` has, in the order of names; where ranks hold parts, every rank must ask at once."""
        found: list[Entry] = []
        for name, parameter, part in self.parts():
            if self.sharded and parameter is not None:
                found.append(Entry(name, part.dtype, self._holding.shapes[parameter], self._per_rank[parameter]))
            else:
                found.append(Entry(name, part.dtype, part.shape, None))
        return sorted(found, key=lambda one: one.name)

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
                yield name, self.whole_of(parameter, part)

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights and buffers; every rank must call it."""
        return {name.removeprefix(MODEL): value for name, value in self.whole(MODEL)}

    def weights_sha256(self) -> str:
        """Return the digest of the whole weights and buffers; every rank must call it. No rank has all of them at once."""
        parts = sorted((part for part in self.parts() if part[0].startswith(MODEL)), key=lambda part: part[0])
        return sha256_of((name.removeprefix(MODEL), self.whole_of(parameter, part)) for name, parameter, part in parts)

    def whole_of(self, parameter: str | None, part: Tensor) -> Tensor:
        """Return the whole of a parameter's values, or of what belongs to them, of which this rank has a part; every rank must call it."""
        if parameter is None or not self.sharded:
            return part
        assert self._ranks is not None
        counts = self._per_rank[parameter]
        self._ranks.heartbeat.waiting()
        return self._ranks.collected(flat(part), counts, everywhere=True).view(self._holding.shapes[parameter])

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole tensors as they come, and keep this rank's part of each."""
        own: dict[str, Any] = self.model.state_dict() | self._parameters
        wanted = {MODEL + name: one for name, one in own.items()} | {AVERAGE + name: one for name, one in self.average.parts.items()}
        places = {one: index for index, one in enumerate(one for group in self.optimizer.param_groups for one in group["params"])}
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors:
            kind, _, rest = name.partition(".")
            if kind + "." == OPTIMIZER:
                owner, _, key = rest.rpartition(".")
                # A count of steps is no part of a parameter.
                part = self._holding.part(owner, value) if value.ndim else value
                states.setdefault(places[self._parameters[owner]], {})[key] = _laid_out_like(self._parameters[owner], part)
            elif name in wanted:
                self._take(rest, wanted.pop(name), value)
            elif kind + "." == MODEL:
                raise another_model(f"{rest} is not in both")
        if wanted:
            raise another_model(f"{min(wanted).partition('.')[2]} is not in both")
        self.optimizer.load_state_dict({"state": states, "param_groups": self.optimizer.state_dict()["param_groups"]})

    def _take(self, name: str, part: Tensor, whole: Tensor) -> None:
        own = self._holding.part(name, whole) if name in self._parameters else whole
        if own.shape != part.shape:
            raise another_model(f"{name} has the shape {list(whole.shape)} there")
        part.detach().copy_(own)


def another_model(what: str) -> RuntimeError:
    """The error for a checkpoint that does not fit."""
    return RuntimeError(f"the checkpoint is of another model: {what}")


def flat(part: Tensor) -> Tensor:
    """A tensor's elements in the host's memory, row by row."""
    return part.detach().cpu().contiguous().view(-1)


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """The same values in the parameter's memory order: fused optimizers walk both as flat memory."""
    if value.shape != parameter.shape:
        return value.clone()
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
