"""Where two trainings first differ."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.report.difference import Difference, checkpoints, in_figures, in_tensors, learned, shared
from pipeline.tracking.journal import Journal


def test_only_what_was_learned_is_compared(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.metrics({"train/loss": 2.0, "train/images_per_second": 9.0}, 1)
    journal.metrics({"test/loss": 1.0, "best/epoch": 1.0}, 2)
    journal.metrics({"validation/loss": 1.5}, 3)
    assert learned(tmp_path / "journal.jsonl") == {1: {"train/loss": 2.0}, 3: {"validation/loss": 1.5}}
    assert learned(tmp_path / "none.jsonl") == {}


def test_the_first_other_bit_of_a_figure_is_told() -> None:
    there = {1: {"a": 1.0}, 2: {"a": 0.1, "b": 5.0}, 3: {"a": 4.0}}
    assert in_figures(there, there, 0, 3) is None
    assert in_figures(there, {}, 1, 1) is None
    assert in_figures(there, there | {2: {"a": 0.1, "b": 5.0000000000000009}, 3: {}}, 0, 3) == Difference(
        2, "b: 0x1.4000000000000p+2 there, 0x1.4000000000001p+2 here"
    )
    assert in_figures(there, there | {2: {"b": 5.0}}, 0, 3) == Difference(2, "a: 0x1.999999999999ap-4 there, none here")
    assert in_figures(there, there | {3: {}}, 0, 2) is None
    assert shared(there, 0, 3) == 4
    assert shared(there, 1, 2) == 2


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_first_other_tensor_of_the_first_other_checkpoint_is_told(kind: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=kind), "b": torch.zeros(2, 2, dtype=kind), "c": torch.zeros(0, dtype=kind), "d": torch.ones(1)}
    other = tensors | {"b": torch.tensor([[0, 0], [0, -0.0]], dtype=kind), "d": torch.ones(1, 1)}
    for folder, by_step in (("there", {5: tensors, 10: tensors, 15: tensors}), ("here", {10: tensors, 15: other, 20: other})):
        (tmp_path / folder).mkdir()
        for step, values in by_step.items():
            save_file(values, tmp_path / folder / f"step-{step:08d}.safetensors")
    both = checkpoints(tmp_path / "there", tmp_path / "here", 0, 20)
    assert [step for step, _, _ in both] == [10, 15]
    assert checkpoints(tmp_path / "there", tmp_path / "here", 10, 14) == []
    assert in_tensors(both[:1]) is None
    assert in_tensors(both) == Difference(15, "tensor b and 1 more of 4")
