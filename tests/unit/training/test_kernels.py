"""A kernel that cuDNN replaced for want of memory ends a rank before anything of it is kept."""

import pytest
import torch

from pipeline.config import MachineError
from pipeline.training.guard import NonFiniteGuard
from pipeline.training.state import State
from tests.unit.training.test_checkpoint import SingleNode


def test_it_is_asked_before_figures_and_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    guard = NonFiniteGuard(State(model, torch.optim.SGD(model.parameters(), lr=0.1)), SingleNode(), lambda step: "")
    guard.raise_if_diverged()
    guard.check(1)
    # In the place of a GPU's allocator, which this machine may lack.
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: {"num_ooms": 1})
    for keep in (guard.raise_if_diverged, lambda: guard.check(1)):
        with pytest.raises(MachineError, match="another kernel"):
            keep()


def test_a_process_with_several_gpus_asks_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    guard = NonFiniteGuard(State(model, torch.optim.SGD(model.parameters(), lr=0.1)), SingleNode(), lambda step: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index=0: {"num_ooms": int(index == 2)})
    with pytest.raises(MachineError, match="another kernel"):
        guard.raise_if_diverged()
