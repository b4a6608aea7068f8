"""Kernels and sums that come late, and nccl between ranks: no bit depends on when anything runs. `LOCKSTEP_GPU=cpu` rehearses it."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import parallel
from pipeline.job import Job
from pipeline.parallel import fsdp, ordered
from pipeline.ranks import Ranks
from tests.kit.devices import GPU, NCCL, SHARED_BY_NCCL, gpu
from tests.ranks.test_bits import RESNET_BF16, trained
from tests.ranks.test_gpu import LENET, job_on_gpu

# A CPU that has no bf16 takes minutes for ResNet-18.
CASES = (LENET, RESNET_BF16) if GPU == "cuda" else (LENET,)


@gpu("G4: nccl between ranks, on GPUs of their own or on one, has the bits of one rank, under every strategy that promises bits")
@pytest.mark.parametrize("strategy", [one for one in parallel.CATALOGUE if one not in ("dataparallel", "tensor")])
def test_nccl_between_ranks_has_the_bits_of_one(strategy: str, tmp_path: Path, run_ranks) -> None:
    if GPU == "cuda" and torch.cuda.device_count() < 2 and torch.cuda.nccl.version() < (2, 30):
        pytest.skip("this NCCL needs a GPU for each rank")
    where = SHARED_BY_NCCL if GPU == "cuda" and torch.cuda.device_count() < 2 else {}
    for case in CASES:
        ((expected, _),) = run_ranks(1, (trained, (job_on_gpu(tmp_path, case, "alone"), None)), device=GPU)[0]
        job = job_on_gpu(tmp_path, case, f"{strategy}", 2)
        dist = job.config.dist.model_copy(update={"strategy": strategy})
        job = job.model_copy(update={"config": job.config.model_copy(update={"dist": dist})})
        for function, arguments in ((trained, (job, None)), (late, (job.model_copy(update={"run": job.run / "late"}),))):
            found = {digest for ((digest, _),) in run_ranks(2, (function, arguments), device=GPU, backend=NCCL, **where)}
            assert found == {expected}, (case, function.__name__)


def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, a hundredth of a second later on the stream that it runs on."""

    # DDP reads a hook's signature.
    @functools.wraps(function)
    def later(*arguments: Any, **options: Any) -> Any:
        torch.cuda._sleep(20_000_000) if GPU == "cuda" else time.sleep(0.001)
        return function(*arguments, **options)

    return later


def late(group: Ranks, job: Job) -> tuple[str, int]:
    """Train with a GPU that is behind when a bucket is ready, and sums that come late: what does not wait reads what is not there."""
    patch = pytest.MonkeyPatch()
    for owner, name in (
        (ordered.LaneGradients, "hook"),
        (ordered.OrderedSum, "result"),
        (ordered.OrderedSum, "share"),
        (fsdp.OrderedReduceScatter, "__call__"),
        (fsdp.Gather, "__call__"),
    ):
        patch.setattr(owner, name, delayed(getattr(owner, name)))
    try:
        return trained(group, job, None)
    finally:
        patch.undo()


@gpu("G5: no race: late kernels, blocking launches and an allocator without a cache change no bit")
def test_no_bit_depends_on_when_kernels_run(tmp_path: Path, run_ranks) -> None:
    ways: list[tuple[str, Any, dict[str, str]]] = [
        ("plain", trained, {}),
        ("late", late, {}),
        ("blocking", trained, {"CUDA_LAUNCH_BLOCKING": "1"}),
        ("without a cache", trained, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    ]
    for case in CASES:
        found = set()
        for name, function, environment in ways:
            for size, backend in ((1, NCCL), (2, "gloo")):
                job = job_on_gpu(tmp_path, case, f"{name} {size}", size)
                work = (function, (job,) if function is late else (job, None))
                found |= {digest for ((digest, _),) in run_ranks(size, work, device=GPU, backend=backend, **environment)}
        assert len(found) == 1, case
