"""Checkpoints: atomic, hashed, kept and dropped in an order that always leaves a good one."""

import io
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import MachineError
from pipeline.heartbeat import Heartbeat
from pipeline.tracking.journal import Journal
from pipeline.training.checkpoint import INDEX, Checkpoints, read_or_rebuild_index
from pipeline.training.checkpoint_file import TensorFile, weights_sha256
from pipeline.training.state import State, _laid_out_like


class SingleNode:
    """The first and only rank."""

    heartbeat = Heartbeat(None)

    def on_rank_zero(self, thing, otherwise):
        return thing()

    def while_others_wait(self, thing):
        with self.heartbeat.beating():
            thing()

    def broadcast_bytes(self, content: bytes) -> bytes:
        return content

    def broadcast(self, values: Tensor) -> None:
        pass

    def start_logical_or(self, flag: bool):
        return lambda: flag


def packed(tensors: dict[str, Tensor], **facts: str) -> bytes:
    """What a checkpoint's file holds."""
    file = io.BytesIO()
    TensorFile({name: (one.dtype, list(one.shape)) for name, one in tensors.items()}, sorted(tensors.items()), **facts).write_to(file)
    return file.getvalue()


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 36, 2)).to(memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step)).contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()


def save_steps(folder: Path, *steps: int, keep: int = 2) -> str:
    model, optimizer = parts()
    checkpoints = Checkpoints(folder, keep, SingleNode())
    done = 0
    for step in steps:
        descend(model, optimizer, range(done, step))
        done = step
        checkpoints.save(step, State(model, optimizer))
    return weights_sha256(model.state_dict())


def test_restored_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Also with channels-last weights, whose momentum has another memory order than safetensors give it."""
    expected = save_steps(tmp_path / "whole", 9)
    save_steps(tmp_path / "cut", 4)
    model, optimizer = parts()
    descend(model, optimizer, range(50, 53))
    assert Checkpoints(tmp_path / "cut", 2, SingleNode()).restore(State(model, optimizer)) == 4
    descend(model, optimizer, range(4, 9))
    assert weights_sha256(model.state_dict()) == expected


def test_the_newest_are_kept_and_nothing_else_lies_about(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX, "step-00000003.safetensors", "step-00000004.safetensors"]


def test_the_best_model_is_kept_apart_and_of_equals_the_first(tmp_path: Path) -> None:
    model, optimizer = parts()
    checkpoints = Checkpoints(tmp_path, 1, SingleNode())
    for step, accuracy in ((10, 0.5), (20, 0.7), (30, 0.7), (40, 0.6)):
        checkpoints.save_best(State(model, optimizer), step, accuracy)
    best = read_or_rebuild_index(tmp_path)["best"]
    assert (best["step"], best["accuracy"]) == (20, 0.7)
    assert [path.name for path in tmp_path.glob("best-*")] == [best["file"]]


def test_a_start_that_goes_on_keeps_a_better_model_and_of_equals_the_first(tmp_path: Path) -> None:
    for step, accuracy in ((20, 0.7), (30, 0.6), (40, 0.7), (50, 0.8)):
        Checkpoints(tmp_path, 1, SingleNode()).save_best(State(*parts()), step, accuracy)
        assert read_or_rebuild_index(tmp_path)["best"]["step"] == (50 if step == 50 else 20)


@pytest.mark.parametrize("length", [0, 1, 100, -1])
@pytest.mark.fault(9, "a checkpoint cut at 0, 1, 100 bytes and one before its end")
def test_a_checkpoint_cut_short_is_refused_and_the_one_before_is_taken(length: int, tmp_path: Path, caplog) -> None:
    save_steps(tmp_path, 3, 6)
    path = tmp_path / "step-00000006.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert Checkpoints(tmp_path, 2, SingleNode()).restore(State(*parts())) == 3
    assert "step-00000006.safetensors is damaged" in caplog.text


def test_one_flipped_bit_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 3, 6)
    path = tmp_path / "step-00000006.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert Checkpoints(tmp_path, 2, SingleNode()).restore(State(*parts())) == 3


def test_no_good_checkpoint_left_is_an_error_and_never_a_start_from_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path, 3, 6)
    for path in tmp_path.glob("step-*"):
        path.write_bytes(b"")
    with pytest.raises(MachineError, match="no good checkpoint is left of 2"):
        Checkpoints(tmp_path, 2, SingleNode()).restore(State(*parts()))


def test_a_run_without_checkpoints_starts_at_0(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, 2, SingleNode()).restore(State(*parts())) == 0
    journal = tmp_path / "journal.jsonl"
    Journal(journal).metrics({"train/loss": 1.0}, 1)
    assert Checkpoints(tmp_path, 2, SingleNode(), journal).restore(State(*parts())) == 0


def test_a_step_saved_twice_is_listed_once(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    save_steps(tmp_path, 3)
    assert [entry["step"] for entry in json.loads((tmp_path / INDEX).read_text())["checkpoints"]] == [3]


def test_the_digest_sees_names_shapes_and_every_bit() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    changed = [
        {"a": torch.zeros(3, 2), "b": torch.ones(1)},
        {"c": torch.zeros(2, 3), "b": torch.ones(1)},
        {"a": -torch.zeros(2, 3), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.ones(1)},
    ]
    assert all(weights_sha256(one) != weights_sha256(tensors) for one in changed)
    assert weights_sha256(dict(reversed(tensors.items()))) == weights_sha256(tensors)


def test_what_an_optimizer_keeps_besides_tensors_is_left_out(tmp_path: Path) -> None:
    model, optimizer = parts()
    descend(model, optimizer, range(1))
    optimizer.state[next(model.parameters())]["calls"] = 3
    Checkpoints(tmp_path, 3, SingleNode()).save(1, State(model, optimizer))
    model, optimizer = parts()
    assert Checkpoints(tmp_path, 3, SingleNode()).restore(State(model, optimizer)) == 1
    assert optimizer.state_dict()["state"][0].keys() == {"momentum_buffer"}


def test_the_state_of_an_optimizer_takes_the_memory_order_of_its_weights_and_keeps_its_type() -> None:
    weights = torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    value = torch.randn(2, 3, 4, 4)
    found = _laid_out_like(weights, value)
    assert torch.equal(found, value)
    assert (found.stride(), found.dtype) == (weights.stride(), torch.float32)
    step = torch.tensor(3.0)
    kept = _laid_out_like(weights, step)
    assert torch.equal(kept, step)
    # What comes may lie in a file that is mapped into memory.
    assert kept.data_ptr() != step.data_ptr()
