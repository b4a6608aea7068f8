"""A checkpoint's file: safetensors written as its tensors come, which prove themselves."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from safetensors.torch import save as plain_save
from torch import Tensor, nn

from pipeline.files import atomic_write
from pipeline.training.checkpoint_file import TYPES, TensorFile, facts_of, proven, weights_sha256
from tests.unit.training.test_checkpoint import packed

TENSORS: dict[str, Tensor] = {
    "b": torch.arange(6.0).view(2, 3).t(),
    "a": nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
    "c": torch.empty(0),
    "d": torch.tensor(3),
}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_the_digest_of_a_model_is_the_one_of_earlier_versions() -> None:
    """Receipts and MLflow hold it: name, type, shape and bytes, in the order of names."""
    plain = [
        b"a torch.bfloat16 [2]\n\x80\x3f\x80\x3f",
        b"b torch.float32 [3, 2]\n" + torch.tensor([0.0, 3, 1, 4, 2, 5]).numpy().tobytes(),
        b"c torch.float32 [0]\n",
        b"d torch.int64 []\n\x03" + bytes(7),
    ]
    assert weights_sha256(TENSORS) == sha256(b"".join(plain))


def put(folder: Path, content: bytes) -> Path:
    path = folder / "one.safetensors"
    path.write_bytes(content)
    return path


def test_a_file_holds_its_tensors_and_what_is_known_of_them(tmp_path: Path) -> None:
    content = packed(TENSORS, step="7", accuracy="0.5")
    assert weights_sha256(load(content)) == weights_sha256(TENSORS)
    facts = facts_of(put(tmp_path, content))
    assert {name: value for name, value in facts.items() if name != "digest"} == {"step": "7", "accuracy": "0.5"}
    assert proven(put(tmp_path, content)) == {"step": "7", "accuracy": "0.5"}
    other = packed(TENSORS, accuracy="0.5", step="7")
    assert other != content
    assert facts_of(put(tmp_path, other)) == facts


def test_a_file_is_the_one_that_safetensors_writes_of_all_at_once(tmp_path: Path) -> None:
    every = {str(kind): torch.ones(3).to(kind) for kind in TYPES} | TENSORS | {"\u00fc": torch.ones(1)}
    content = packed(every, step="7")
    plain = {name: value.detach().contiguous() for name, value in every.items()}
    assert plain_save(plain, {"lockstep": json.dumps(facts_of(put(tmp_path, content)))}) == content


def test_a_file_knows_its_size_before_and_its_digest_once_it_is_written(tmp_path: Path) -> None:
    file = TensorFile({"a": (torch.float32, [2])}, [("a", torch.ones(2))], step="7")
    atomic_write(tmp_path / "a", file)
    content = (tmp_path / "a").read_bytes()
    assert (file.size_bytes, file.sha256) == (len(content), sha256(content))


def test_a_tensor_that_does_not_come_leaves_no_file(tmp_path: Path) -> None:
    file = TensorFile({"a": (torch.float32, [2]), "b": (torch.float32, [2])}, [("a", torch.ones(2))])
    with pytest.raises(AssertionError, match="b has not come"):
        atomic_write(tmp_path / "a", file)
    assert not (tmp_path / "a").exists()


def test_the_digest_in_a_file_is_the_one_of_earlier_versions(tmp_path: Path) -> None:
    plain = json.dumps([weights_sha256(TENSORS), {"accuracy": "0.5", "step": "7"}])
    assert facts_of(put(tmp_path, packed(TENSORS, step="7", accuracy="0.5")))["digest"] == sha256(plain.encode())


def with_header(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        packed(TENSORS, step="7")[:-1],
        packed(TENSORS, step="7") + b"\0",
        packed(TENSORS, step="7").replace(b'step\\": \\"7', b'step\\": \\"8'),
        packed(TENSORS, step="7")[:-1] + b"\x01",
        plain_save({"a": torch.ones(1)}),
        plain_save({"a": torch.ones(1)}, {"other": "{}"}),
        plain_save({"a": torch.ones(1)}, {"lockstep": "{}"}),
        plain_save({"a": torch.ones(1)}, {"lockstep": "not JSON"}),
        plain_save({"a": torch.ones(1)}, {"lockstep": "1"}),
        with_header([]),
        with_header(b"\xff{"),
    ],
    ids=range(12),
)
def test_a_file_that_is_not_whole_proves_nothing(content: bytes, tmp_path: Path) -> None:
    assert proven(put(tmp_path, content)) is None
