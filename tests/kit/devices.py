"""Where a test computes: on the CPU, and on a GPU where there is one."""

import os
from collections.abc import Callable

import pytest
import torch

# `LOCKSTEP_GPU=cpu` rehearses the tests of GPUs on a machine without one.
GPU = os.environ.get("LOCKSTEP_GPU", "cuda")
NCCL = "nccl" if GPU == "cuda" else "gloo"
# For ranks that are to share a GPU; where NCCL refuses that, its newer versions can be told not to.
ONE_GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]} if GPU == "cuda" else {}
SHARED_BY_NCCL = ONE_GPU | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
MISSING = GPU == "cuda" and not torch.cuda.is_available()


def also_on_gpu(proves: str) -> pytest.MarkDecorator:
    """Run a test on the CPU and on a GPU; `proves` is what it proves there."""
    return pytest.mark.parametrize("device", ["cpu", pytest.param(GPU, marks=pytest.mark.gpu(proves), id="gpu")])


def gpu(proves: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test that needs a GPU with what it proves there."""
    return lambda function: pytest.mark.slow(pytest.mark.gpu(proves)(function))
