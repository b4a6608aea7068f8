"""Checkpoints: written whole, hashed, listed in an index; the newest good one is what a run resumes from."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.config import MachineError
from pipeline.files import write_whole
from pipeline.ranks import Ranks

log = logging.getLogger(__name__)

INDEX = "index.json"


def weights_sha256(tensors: dict[str, Tensor]) -> str:
    """The digest of a model: name, type, shape and bytes of all its tensors, in the order of names."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.detach().cpu().contiguous()
        total.update(f"{name} {whole.dtype} {list(whole.shape)}\n".encode())
        total.update(whole.view(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return total.hexdigest()


def state_bytes(model: nn.Module) -> bytes:
    """A model's tensors as safetensors."""
    return to_bytes(_plain(model.state_dict()))


class Checkpoints:
    """The checkpoints of one run: rank 0 writes and reads the files, the others receive its bytes."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks):
        self._folder, self._keep, self._ranks = folder, keep, ranks
        self._saved = -1

    def restore(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Load the newest good checkpoint and return its step; 0 where there is none yet."""
        content = self._ranks.from_first(self._ranks.only_first(self._newest, b""))
        if not content:
            return 0
        tensors = from_bytes(content)
        step = int(tensors.pop("step").item())
        model.load_state_dict({name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")})
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = _laid_out_like(parameters[int(index)], value)
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        self._saved = step
        return step

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Write a checkpoint of this step, unless there is one, and drop the oldest."""
        if step == self._saved:
            return
        self._saved = step
        self._ranks.only_first(lambda: self._write(step, model, optimizer), None)

    def save_best(self, model: nn.Module, step: int, accuracy: float) -> None:
        """Keep the model with the highest accuracy on validation; of equals, the first."""
        self._ranks.only_first(lambda: self._write_best(model, step, accuracy), None)

    def _write(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        tensors = {"step": torch.tensor(step)}
        tensors |= {f"model.{name}": value for name, value in model.state_dict().items()}
        state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
        for index, values in state.items():
            tensors |= {f"optimizer.{index}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
        content = to_bytes(_plain(tensors))
        file = f"step-{step:08d}.safetensors"
        write_whole(self._folder / file, content)
        index = self._index()
        entries = [entry for entry in index["checkpoints"] if entry["step"] < step]
        entries.append({"step": step, "file": file, "sha256": hashlib.sha256(content).hexdigest()})
        kept = entries[-self._keep :]
        self._write_index(index | {"checkpoints": kept})
        # Only what the index no longer names is removed, and last: a kill anywhere leaves what the index names.
        for gone in {entry["file"] for entry in index["checkpoints"]} - {entry["file"] for entry in kept}:
            (self._folder / gone).unlink(missing_ok=True)

    def _write_best(self, model: nn.Module, step: int, accuracy: float) -> None:
        index = self._index()
        best = index.get("best")
        if best is not None and best["step"] != step and best["accuracy"] >= accuracy:
            return
        content = state_bytes(model)
        file = f"best-{step:08d}.safetensors"
        write_whole(self._folder / file, content)
        self._write_index(
            index | {"best": {"step": step, "accuracy": accuracy, "file": file, "sha256": hashlib.sha256(content).hexdigest()}}
        )
        if best is not None and best["file"] != file:
            (self._folder / best["file"]).unlink(missing_ok=True)

    def _newest(self) -> bytes:
        entries = self._index()["checkpoints"]
        for entry in reversed(entries):
            content = checked(self._folder, entry)
            if content is not None:
                return content
        if entries:
            raise MachineError(f"{self._folder}: no good checkpoint is left of {len(entries)}; remove the run's folder to start again")
        return b""

    def _index(self) -> dict[str, Any]:
        return read_index(self._folder)

    def _write_index(self, index: dict[str, Any]) -> None:
        write_whole(self._folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def read_index(folder: Path) -> dict[str, Any]:
    """What is listed: checkpoints from old to new, and the best model."""
    path = folder / INDEX
    return json.loads(path.read_text()) if path.exists() else {"checkpoints": []}


def checked(folder: Path, entry: dict[str, Any]) -> bytes | None:
    """A listed file's content, or None with a warning where it is not what was written."""
    path = folder / entry["file"]
    content = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(content).hexdigest() == entry["sha256"]:
        return content
    log.warning("%s is damaged (%d bytes)", path, len(content))
    return None


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """The same values in the parameter's memory order: fused optimizers walk both as flat memory."""
    if value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
