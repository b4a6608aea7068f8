"""Environment variables that change what ranks compute: fixed, part of the identity, or kept from ranks."""

import os
from collections.abc import Mapping

# The same in every rank, whatever the environment says.
FIXED = {
    # cuBLAS is deterministic only with a workspace of fixed size.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # torchrun and ranks fail at import on a level that `logging` does not know, and say nothing of failures above WARNING.
    "LOGLEVEL": "WARNING",
    # Of numpy: ranks are forked from a process without threads.
    "OPENBLAS_NUM_THREADS": "1",
    # The order of sets, and how text files are read, on every machine.
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    # It picks GEMM kernels by timing.
    "PYTORCH_TUNABLEOP_ENABLED": "0",
}
# What a user may choose, as part of the identity: the kernels of CPUs, and of GPUs.
CPU_SWITCHES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    # It picks the kernels of libm.
    "GLIBC_TUNABLES",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
)
GPU_SWITCHES = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "NVIDIA_TF32_OVERRIDE")
# What changes the order in which NCCL adds, where it adds: under `native`.
NCCL_SWITCHES = (
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
)
# Where things are, and how memory is allocated: no bit depends on it.
HARMLESS = (
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHOME",
    "PYTHONNOUSERSITE",
    "PYTHONPATH",
    "PYTHONPYCACHEPREFIX",
    "PYTHONUSERBASE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
# Of the libraries that compute and start ranks. What begins like this and is not named above does not reach a rank.
FAMILIES = (
    "ATEN_",
    "CUBLAS",
    "CUDA_FORCE_",
    "CUDNN_",
    "DISABLE_ADDMM_CUDA_LT",
    "DNNL_",
    "GLIBC_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "NPY_",
    "NVIDIA_TF32",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    # torchrun reads these, which an engine has set for the command above us.
    "PET_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
)


def for_ranks(variables: Mapping[str, str], threads: int) -> dict[str, str]:
    """What torchrun and its ranks may see of these variables, with what is fixed for them."""
    chosen = (*CPU_SWITCHES, *GPU_SWITCHES, *HARMLESS)
    passed = {name: value for name, value in variables.items() if name in chosen or not name.startswith(FAMILIES)}
    return passed | FIXED | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def switches(names: tuple[str, ...]) -> list[str]:
    """Those of the switches that are set, as NAME=VALUE."""
    return [f"{name}={os.environ[name]}" for name in names if name in os.environ]
