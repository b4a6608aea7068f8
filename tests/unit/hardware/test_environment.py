"""Which environment variables reach ranks."""

from pipeline.hardware.environment import CPU_SWITCHES, FAMILIES, FIXED, GPU_SWITCHES, HARMLESS, for_ranks

# One that a user sets for good reason, or an engine, or this pipeline.
PASSED = {
    "PATH": "/usr/bin",
    "LD_LIBRARY_PATH": "/lib",
    "CUDA_VISIBLE_DEVICES": "1",
    "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps",
    "NCCL_DEBUG": "INFO",
    "GLOO_SOCKET_IFNAME": "eth0",
    "PYTHONPATH": "/code",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "LOCKSTEP_STORE": "leader:29400",
}
# All are read by torch 2.14.1, its libraries, Python or torchrun.
KEPT_AWAY = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUDA_FORCE_PTX_JIT",
    "CUDNN_ERRATA_JSON_FILE",
    "DISABLE_ADDMM_CUDA_LT",
    "GOMP_CPU_AFFINITY",
    "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT",
    "PET_NNODES",
    "PYTHONOPTIMIZE",
    "PYTHONSTARTUP",
    "PYTHONWARNINGS",
    "PYTORCH_TUNABLEOP_TUNING",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_USE_HEURISTIC_MODE_B",
    "TORCH_CUDNN_V8_API_DISABLED",
    "TORCH_NCCL_BLOCKING_WAIT",
)


def test_ranks_see_what_is_theirs_and_nothing_that_changes_bits_or_endings() -> None:
    strange = dict.fromkeys(KEPT_AWAY, "1") | dict.fromkeys((*FIXED, "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "a stranger's")
    chosen = dict.fromkeys((*CPU_SWITCHES, *GPU_SWITCHES), "a user's")
    expected = PASSED | chosen | FIXED | {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    assert for_ranks(PASSED | chosen | strange, 3) == expected
    assert for_ranks({}, 1) == FIXED | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def test_every_switch_stands_in_one_list() -> None:
    lists = (tuple(FIXED), CPU_SWITCHES, GPU_SWITCHES, HARMLESS)
    assert len({name for names in lists for name in names}) == sum(map(len, lists))
    # Or it would pass without being named.
    assert all(name.startswith(FAMILIES) for name in (*CPU_SWITCHES, *HARMLESS))
