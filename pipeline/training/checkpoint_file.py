"""A checkpoint's file: tensors and facts as safetensors, with a digest of both in its header, by which it proves itself."""

import hashlib
import json
from collections.abc import Callable, Iterable

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor


def weights_sha256(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of a model: name, dtype, shape and bytes of all tensors, sorted by name."""
    return sha256_of(sorted(tensors.items()))


def sha256_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same of tensors that come one by one, in the order of their names."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        whole = tensor.detach().cpu().contiguous()
        total.update(f"{name} {whole.dtype} {list(whole.shape)}\n".encode())
        total.update(whole.view(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return total.hexdigest()


def copied(tensors: Iterable[tuple[str, Tensor]]) -> Callable[[], dict[str, Tensor]]:
    """Start to copy tensors to the host's memory; the returned function waits for the copies and returns them."""
    copies: dict[str, Tensor] = {}
    on_gpu = False
    for name, value in tensors:
        on_gpu |= value.is_cuda
        copies[name] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda).copy_(value.detach(), non_blocking=True)
    done = torch.cuda.Event() if on_gpu else None
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
