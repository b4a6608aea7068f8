"""A checkpoint's file: tensors and facts as safetensors, with a digest of both in its header, by which it proves itself."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer


def weights_sha256(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of a model: name, dtype, shape and bytes of all tensors, sorted by name."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.detach().cpu().contiguous()
        total.update(f"{name} {whole.dtype} {list(whole.shape)}\n".encode())
        total.update(whole.view(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return total.hexdigest()


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors by the names of their parameters: `optimizer.fc.weight.momentum_buffer`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    states: dict[Tensor, dict[str, Any]] = optimizer.state
    return {
        f"optimizer.{names[parameter]}.{key}": value
        for parameter, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def copied(tensors: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Start to copy tensors to the host's memory; the returned function waits for the copies and returns them."""
    copies = {
        name: torch.empty_like(value, device="cpu", pin_memory=value.is_cuda).copy_(value.detach(), non_blocking=True)
        for name, value in tensors.items()
    }
    done = torch.cuda.Event() if any(value.is_cuda for value in tensors.values()) else None
    if done is not None:
        done.record()

    def wait() -> dict[str, Tensor]:
        if done is not None:
            done.synchronize()
        return copies

    return wait


def packed(tensors: dict[str, Tensor], **facts: str) -> bytes:
    """Return tensors and facts as safetensors, with a digest over both."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    # Under one key: safetensors writes several in no fixed order.
    return save(plain, {"lockstep": json.dumps(facts | {"digest": _proof(plain, facts)})})


def facts_of(content: bytes) -> dict[str, str]:
    """Return the facts in a file's header."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return dict(json.loads(header["__metadata__"]["lockstep"]))


def proven(content: bytes) -> dict[str, str] | None:
    """Return the facts if the file is intact, else None."""
    try:
        facts = facts_of(content)
        digest = facts.pop("digest")
        return facts if _proof(load(content), facts) == digest else None
    except (SafetensorError, ValueError, KeyError, TypeError):
        return None


def _proof(tensors: dict[str, Tensor], facts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([weights_sha256(tensors), facts], sort_keys=True).encode()).hexdigest()
