"""What this machine computes with, found out without torch."""

import ctypes
import getpass
import os
import platform
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pipeline.config import MachineError

# What oneDNN, MKL and ATen choose their kernels by: another choice rounds differently.
INSTRUCTION_SETS = ("avx2", "avx512", "avx_vnni", "amx", "fma", "asimd", "sve", "bf16", "i8mm")
OVERRIDES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
# CUDA's compute capability from which on bf16 is native.
AMPERE = 8
# cuInit's answer where there is a driver and no GPU.
CUDA_ERROR_NO_DEVICE = 100


@dataclass(frozen=True)
class Machine:
    """GPUs by name, and the kind of CPU."""

    gpus: list[str]
    capability: int
    cpu: str
    cpu_has_bf16: bool
    # The CUDA that the driver can do, as 13000 for 13.0; 0 without one.
    driver: int = 0


def detect() -> Machine:
    """This machine, as CUDA_VISIBLE_DEVICES leaves it."""
    gpus, capability, driver = _gpus()
    cpu, has_bf16 = _cpu(Path("/proc/cpuinfo"))
    return Machine(gpus, capability, cpu, has_bf16, driver)


def user() -> str:
    """Who runs this; in a container a uid may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def check_writable(folder: Path) -> None:
    """MachineError where this user may not write, with what a container must be started with."""
    if not os.access(folder, os.W_OK):
        owner = folder.stat()
        cure = f"let it run as its owner; with Compose: env UID={owner.st_uid} GID={owner.st_gid} docker compose up"
        raise MachineError(f"{folder}: belongs to uid {owner.st_uid}, and uid {os.getuid()} may not write there; {cure}")


def _cpu(info: Path) -> tuple[str, bool]:
    """The kind of CPU: maker, cache and instruction sets, and what the environment takes away from them."""
    text = info.read_text() if info.exists() else ""
    flags = set(" ".join(re.findall(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)[:1]).split())
    maker = re.findall(r"^(?:vendor_id|CPU implementer)\s*: (.*)$", text, re.MULTILINE)[:1]
    cache = re.findall(r"^cache size\s*: (.*)$", text, re.MULTILINE)[:1]
    sets = sorted(flag for flag in flags if flag.startswith(INSTRUCTION_SETS))
    overrides = _overrides()
    kind = " ".join([platform.machine(), *maker, *(one.replace(" ", "") for one in cache), *sets, *overrides])
    return kind, bool({"avx512_bf16", "amx_bf16", "bf16"} & flags) and not overrides


def _overrides() -> list[str]:
    return [f"{name}={os.environ[name]}" for name in OVERRIDES if name in os.environ]


def cuda_of_torch() -> int:
    """The CUDA that torch was built with, as 13000 for 13.0; read without importing it."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    found = re.search(r"cuda\b.*= '(\d+)\.(\d+)'", Path(spec.origin).with_name("version.py").read_text())
    return int(found[1]) * 1000 + int(found[2]) * 10 if found else 0


def _gpus() -> tuple[list[str], int, int]:
    """Return the names of the visible GPUs, their lowest capability and the driver's CUDA version; raises MachineError if it is broken."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return [], 0, 0
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], 0, 0
    count, device, major, minor, version = (ctypes.c_int() for _ in range(5))
    error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if error == CUDA_ERROR_NO_DEVICE:
        return [], 0, 0
    if error:
        raise MachineError(
            f"the GPU's driver does not work (cuInit failed with {error}); see nvidia-smi, or set CUDA_VISIBLE_DEVICES= for CPUs"
        )
    names: list[str] = []
    capabilities: list[int] = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(256)
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceComputeCapability(ctypes.byref(major), ctypes.byref(minor), device)
        # The first weights are drawn on the host.
        names.append(" ".join([name.value.decode(), "on", platform.machine(), *_overrides()]))
        capabilities.append(major.value)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return names, min(capabilities, default=0), version.value
