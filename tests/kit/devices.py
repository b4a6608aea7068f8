"""Where a test computes: on the CPU, and on a GPU where there is one."""

import os

import pytest
import torch

# `LOCKSTEP_GPU=cpu` rehearses the tests of GPUs on a machine without one.
GPU = os.environ.get("LOCKSTEP_GPU", "cuda")
NCCL = "nccl" if GPU == "cuda" else "gloo"
MISSING = GPU == "cuda" and not torch.cuda.is_available()


def also_on_gpu(proves: str) -> pytest.MarkDecorator:
    """Run a test on the CPU and on a GPU; `proves` is what it proves there."""
    return pytest.mark.parametrize("device", ["cpu", pytest.param(GPU, marks=pytest.mark.gpu(proves), id="gpu")])


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
