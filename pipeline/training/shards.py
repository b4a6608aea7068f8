"""A copy of a training's state, each rank's part on that rank, and how it becomes a file of whole tensors on rank 0."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.ranks import Ranks
from pipeline.training.checkpoint_file import TYPES, TensorFile, copied, facts_of
from pipeline.training.state import Entry, State, flat


class Shards:
    """What this rank copies and gives; rank 0 gets what it lacks while it writes, and holds no more than one tensor of it at a time."""

    def __init__(self, state: State, prefix: str, ranks: Ranks):
        entries = [one for one in state.entries() if one.name.startswith(prefix)]
        self._own = ranks.on_rank_zero(lambda: entries, [one for one in entries if one.per_rank])
        names = {one.name for one in self._own}
        self._prefix, self._ranks = prefix, ranks
        self._copies = copied((name, part) for name, _, part in state.parts() if name in names)

    def file(self, **facts: str) -> TensorFile:
        """Return the file that rank 0 is to write."""
        layouts = {self._name(one): (one.dtype, list(one.shape)) for one in self._own}
        return TensorFile(layouts, ((self._name(one), value.reshape(one.shape)) for one, value in self._taken()), **facts)

    def exchange(self) -> None:
        """Give this rank's part to rank 0, which writes the file meanwhile; on rank 0: write none."""
        for _ in self._taken():
            pass

    def _name(self, entry: Entry) -> str:
        return entry.name.removeprefix(self._prefix)

    def _taken(self) -> Iterator[tuple[Entry, Tensor]]:
        copies = self._copies()
        for one in self._own:
            own = copies.pop(one.name)
            yield one, own if one.per_rank is None else self._ranks.collected(flat(own), one.per_rank)


def read_everywhere(path: Path | None, ranks: Ranks) -> tuple[dict[str, str], Iterator[tuple[str, Tensor]]]:
    """Return the facts and the tensors of a file of rank 0's on every rank, which must take all of them; no facts where there is none."""
    facts, layouts = json.loads(ranks.broadcast_bytes(ranks.on_rank_zero(lambda: _layouts(path), b"")))
    return facts, _tensors(path, layouts, ranks)


def _layouts(path: Path | None) -> bytes:
    if path is None:
        return b"[{}, {}]"
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in sorted(file.keys())}
        return json.dumps([facts_of(path), {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}]).encode()


def _tensors(path: Path | None, layouts: dict[str, tuple[str, list[int]]], ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    types = {name: kind for kind, name in TYPES.items()}
    opened: Any = ranks.on_rank_zero(lambda: nullcontext() if path is None else safe_open(path, "pt"), nullcontext())
    with opened as file:
        for name, (kind, shape) in layouts.items():
            value = torch.empty(shape, dtype=types[kind])
            value = ranks.on_rank_zero(lambda name=name: file.get_tensor(name), value)
            ranks.broadcast(value)
            yield name, value
