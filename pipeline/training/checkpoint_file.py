"""A checkpoint's file: tensors and facts as safetensors, with a digest of both in its header, by which it proves itself."""

import hashlib
import json
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.files import write_all

# As safetensors calls types, in its order.
TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# A tensor's type and shape.
Layout = tuple[torch.dtype, list[int]]


def weights_sha256(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of a model: name, dtype, shape and bytes of all tensors, sorted by name."""
    return sha256_of(sorted(tensors.items()))


def sha256_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same of tensors that come one by one, in the order of their names."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(_title(name, tensor))
        total.update(_bytes(tensor))
    return total.hexdigest()


def _title(name: str, tensor: Tensor) -> bytes:
    return f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode()


def _bytes(tensor: Tensor) -> bytes:
    """A tensor's values, row by row."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


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


class TensorFile:
    """Tensors and facts as safetensors, with a digest over both. Tensors come in the order of names, and one at a time is held."""

    # Of the whole file, once it is written.
    sha256: str

    def __init__(self, layouts: dict[str, Layout], tensors: Iterable[tuple[str, Tensor]], **facts: str):
        self._tensors, self._facts = tensors, facts
        self._layouts: dict[str, Any] = {}
        self._begins: dict[str, int] = {}
        end, kinds = 0, list(TYPES)
        # The largest types first: whoever maps the file into memory finds numbers at multiples of their size.
        for name, (kind, shape) in sorted(layouts.items(), key=lambda one: (kinds.index(one[1][0]), one[0])):
            begin, end = end, end + torch.Size(shape).numel() * kind.itemsize
            self._layouts[name], self._begins[name] = {"dtype": TYPES[kind], "shape": shape, "data_offsets": [begin, end]}, begin
        self._start = len(self._header("0" * 64))
        self.size_bytes = self._start + end

    def write_to(self, file: FileIO) -> None:
        """Write each tensor to its place as it comes, and then the header, which has their digest."""

        def written() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in self._tensors:
                file.seek(self._start + self._begins.pop(name))
                write_all(file, _bytes(tensor))
                yield name, tensor

        digest = sha256_of(written())
        assert not self._begins, f"{min(self._begins)} has not come"
        file.seek(0)
        write_all(file, self._header(_proof(digest, self._facts)))
        file.seek(0)
        self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()

    def _header(self, proof: str) -> bytes:
        # Under one key: safetensors has several in no fixed order.
        metadata = {"lockstep": json.dumps(self._facts | {"digest": proof})}
        content = json.dumps({"__metadata__": metadata} | self._layouts, separators=(",", ":"), ensure_ascii=False).encode()
        content = content.ljust(-(-len(content) // 8) * 8)
        return len(content).to_bytes(8, "little") + content


def facts_of(path: Path) -> dict[str, str]:
    """Return the facts in a file's header."""
    with safe_open(path, "pt") as file:
        return dict(json.loads(file.metadata()["lockstep"]))


def proven(path: Path) -> dict[str, str] | None:
    """Return the facts if the file is intact, else None."""
    try:
        facts = facts_of(path)
        proof = facts.pop("digest")
        with safe_open(path, "pt") as file:
            digest = sha256_of((name, file.get_tensor(name)) for name in sorted(file.keys()))
        return facts if _proof(digest, facts) == proof else None
    except (SafetensorError, ValueError, KeyError, TypeError):
        return None


def _proof(digest: str, facts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([digest, facts], sort_keys=True).encode()).hexdigest()
