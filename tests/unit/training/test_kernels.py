"""Another kernel than the one that was meant, for want of memory or of another cuDNN, ends a rank before anything of it is kept."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import MachineError
from pipeline.data import Split
from pipeline.data.batches import Pixels
from pipeline.data.order import HOST
from pipeline.ranks import Ranks
from pipeline.training import guard, train_rank
from pipeline.training.evaluation import Evaluation
from pipeline.training.guard import NonFiniteGuard, check_cudnn
from pipeline.training.state import State
from tests.kit.experiment import make_job
from tests.unit.training.test_checkpoint import SingleNode


def test_it_is_asked_before_figures_and_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    watch = NonFiniteGuard(State(model, torch.optim.SGD(model.parameters(), lr=0.1)), SingleNode(), lambda step: "")
    watch.raise_if_diverged()
    watch.check(1)
    # In the place of a GPU's allocator, which this machine may lack.
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: {"num_ooms": 1})
    for keep in (watch.raise_if_diverged, lambda: watch.check(1)):
        with pytest.raises(MachineError, match="another kernel"):
            keep()


def test_it_is_asked_before_an_evaluation_says_what_it_found(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(np.zeros((10, 1, 4, 4), np.uint8), np.zeros(10, np.int64))
    evaluation = Evaluation(split, Pixels([0.0], [1.0], HOST), 2, alone)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: {"num_ooms": 1})
    with pytest.raises(MachineError, match="another kernel"):
        evaluation(model, None)


def test_a_process_with_several_gpus_asks_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    watch = NonFiniteGuard(State(model, torch.optim.SGD(model.parameters(), lr=0.1)), SingleNode(), lambda step: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index=0: {"num_ooms": int(index == 2)})
    with pytest.raises(MachineError, match="another kernel"):
        watch.raise_if_diverged()


@pytest.mark.skipif(torch.backends.cudnn.version() is None, reason="a torch without cuDNN")
def test_another_cudnn_than_the_one_in_the_fingerprint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # This torch with its own cuDNN.
    check_cudnn()
    for other in ("9.1.0.70", "8.24.0.43"):
        monkeypatch.setattr(guard, "version", lambda _, other=other: other)
        with pytest.raises(MachineError, match=rf"cuDNN 9\.\d+\.\d+ is loaded, and {other} is installed"):
            check_cudnn()


def test_an_allocator_that_hides_a_failed_allocation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "check_cudnn", lambda: None)
    guard.check_gpu_libraries()
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(MachineError, match=r"allocator is cudaMallocAsync, which hides .*; take `backend` out of PYTORCH_ALLOC_CONF"):
        guard.check_gpu_libraries()


def test_a_rank_on_a_gpu_asks_which_cudnn_it_has_before_it_meets_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_rank, "fix_bits", lambda _: None)
    monkeypatch.setattr(guard, "version", lambda _: "9.1.0.70")
    with (
        pytest.raises(MachineError, match=r"9\.1\.0\.70 is installed"),
        train_rank.joined(make_job(tmp_path).model_copy(update={"device": "cuda"})),
    ):
        pass
