"""One process with several devices; here all of them are its CPU."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import ConfigError
from pipeline.parallel.dataparallel import DataParallel, shared_out
from pipeline.parallel.lanes import Lanes, Task
from pipeline.ranks import Ranks
from pipeline.training.checkpoint_file import weights_sha256
from tests.ranks.test_strategies import BATCH, STEPS, autocast, batch_of, descend, make_model, one_process, tensors

CPU = torch.device("cpu")


def on_devices(group: Ranks, name: str, bf16: bool, shares: list[int]) -> tuple[str, Any]:
    torch.use_deterministic_algorithms(True)
    model, count = make_model(name, CPU), sum(shares)
    task = Task(model, batch_of(count, CPU), 3, 0.1, autocast(bf16, CPU))
    built = DataParallel(task, Lanes([count], 0, BATCH), group, [CPU] * len(shares), shares)
    totals = []
    for step in range(STEPS):
        totals.append(built.backward(step).over_ranks())
        descend(built.parameters.values())
    return weights_sha256({name: value.clone() for name, value in tensors(model).items()}), totals


def test_lanes_are_shared_out_over_gpus_equally_or_as_asked() -> None:
    assert shared_out(4, 1, None) == [4]
    assert shared_out(5, 2, None) == [3, 2]
    assert shared_out(2, 8, None) == [1, 1]
    assert shared_out(4, 8, [1, 3]) == [1, 3]
    with pytest.raises(ConfigError, match=r"dist.lanes_per_rank: \[1, 1, 2\]: dataparallel takes a number for each GPU, and here are 2"):
        shared_out(4, 2, [1, 1, 2])


@pytest.mark.parametrize("shares", [[4], [2, 2], [1, 3], [1, 2, 1], [1, 1, 1, 1], [2, 4]], ids=str)
@pytest.mark.parametrize(("name", "bf16"), [("mlp", False), ("lenet", True), ("resnet18", False)])
def test_several_devices_have_the_bits_of_one(name: str, bf16: bool, shares: list[int], thread_ranks: Callable[..., list[Any]]) -> None:
    expected, _, totals = one_process(name, sum(shares), bf16)
    assert thread_ranks(1, on_devices, name, bf16, shares) == [(expected, totals)]


def threads_of_openmp() -> int:
    """How many threads a kernel takes that asks OpenMP itself, as oneDNN's do."""
    library = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line)
    return int(ctypes.CDLL(library).omp_get_max_threads())


def test_a_device_computes_on_as_many_threads_as_the_process(alone: Ranks) -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            model = make_model("mlp", CPU)
            task = Task(model, batch_of(2, CPU), 3, 0.1, autocast(False, CPU))
            built = DataParallel(task, Lanes([2], 0, BATCH), alone, [CPU, CPU], [1, 1])
            assert built._threads.submit(threads_of_openmp).result() == count
    finally:
        torch.set_num_threads(before)
