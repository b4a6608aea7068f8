"""What this machine computes with, found out without torch."""

import ctypes
import getpass
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.config import MachineError
from pipeline.hardware.environment import CPU_SWITCHES, GPU_SWITCHES, switches

CPU_INFO = Path("/proc/cpuinfo")
# What oneDNN, MKL and ATen choose their kernels by: another choice rounds differently.
INSTRUCTION_SETS = ("avx2", "avx512", "avx_vnni", "amx", "fma", "asimd", "sve", "bf16", "i8mm")
# The first weights are drawn on the host, with other bits without these. AVX-512 draws the same as AVX2.
DRAWING_SETS = ("avx2", "asimd")
# CUDA's error codes for "there is no GPU": a library without a driver, and a driver without a GPU.
STUB_LIBRARY, NO_DEVICE = 34, 100
# CUDA's device attributes.
MULTIPROCESSORS, CAPABILITY_MAJOR, CAPABILITY_MINOR = 16, 75, 76


@dataclass(frozen=True)
class Machine:
    """The kind of every GPU, the lowest compute capability among them as 90 for 9.0, and the kind of CPU.

    `fast_bf16_on_cpu`: it is known to compute in bf16 in less time than in fp32.
    """

    gpus: list[str]
    capability: int
    cpu: str
    fast_bf16_on_cpu: bool
    # The newest CUDA that the driver supports, as 13000 for 13.0; 0 without one.
    driver: int = 0
    # What tells one GPU, or one slice of it under MIG, from all others.
    uuids: tuple[str, ...] = ()


def detect() -> Machine:
    """Detect visible GPUs and the kind of CPU; raises MachineError if the GPUs' driver does not work."""
    flags, maker, cache_size = _cpu_info(CPU_INFO)
    chosen = switches(CPU_SWITCHES)
    sets = sorted(flag for flag in flags if flag.startswith(INSTRUCTION_SETS))
    drawing = [flag for flag in DRAWING_SETS if flag in flags]
    gpus, capability, driver, uuids = _gpus(" ".join([platform.machine(), *drawing, *chosen, *switches(GPU_SWITCHES)]))
    kind = " ".join([platform.machine(), *maker, *cache_size, *sets, *chosen])
    # A switch may turn the instructions off.
    return Machine(gpus, capability, kind, fast_bf16(flags, maker) and not chosen, driver, uuids)


def fast_bf16(flags: set[str], maker: list[str]) -> bool:
    """Whether such a CPU was seen to gain by bf16. A Xeon without AMX, whose AVX-512 has instructions for it, lost."""
    return "amx_bf16" in flags or ("avx512_bf16" in flags and maker == ["AuthenticAMD"])


@cache
def fast_fp32_products(info: Path = CPU_INFO) -> bool:
    """Whether a CPU multiplies matrices in fp32 as fast as it convolves.

    On AMD's, MKL's products use AVX2 and oneDNN's convolutions AVX-512. Zen 4 computes AVX-512 in two halves, no faster than AVX2; Zen 5,
    which has AVX-VNNI besides, in one.
    """
    flags, maker, _ = _cpu_info(info)
    return not (maker == ["AuthenticAMD"] and {"avx512f", "avx_vnni"} <= flags)


@cache
def avx2_at_most(info: Path = CPU_INFO) -> bool:
    """Whether a CPU computes in AVX2 and in nothing wider: what was measured there says nothing about others."""
    flags, _, _ = _cpu_info(info)
    return "avx2" in flags and "avx512f" not in flags


def user() -> str:
    """The user's name; in a container a uid may have none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def check_writable(folder: Path) -> None:
    """Raise MachineError if this user may not write to a folder, with what a container must be started with."""
    if not os.access(folder, os.W_OK):
        owner = folder.stat()
        cure = f"let it run as its owner; with Compose: env UID={owner.st_uid} GID={owner.st_gid} docker compose up"
        raise MachineError(f"{folder}: belongs to uid {owner.st_uid}, and uid {os.getuid()} may not write there; {cure}")


def _cpu_info(info: Path) -> tuple[set[str], list[str], list[str]]:
    """The flags, maker and cache size of the first CPU."""
    text = info.read_text() if info.exists() else ""
    flags: set[str] = set(" ".join(re.findall(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)[:1]).split())
    maker = re.findall(r"^(?:vendor_id|CPU implementer)\s*: (.*)$", text, re.MULTILINE)[:1]
    cache = re.findall(r"^cache size\s*: (.*)$", text, re.MULTILINE)[:1]
    return flags, maker, [size.replace(" ", "") for size in cache]


def cuda_of_torch() -> int:
    """The CUDA that torch was built with, as 13000 for 13.0; read without importing it."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    found = re.search(r"cuda\b.*= '(\d+)\.(\d+)'", Path(spec.origin).with_name("version.py").read_text())
    return int(found[1]) * 1000 + int(found[2]) * 10 if found else 0


def _gpus(host: str) -> tuple[list[str], int, int, tuple[str, ...]]:
    """The kinds of the visible GPUs on such a host, the lowest capability among them, the driver's CUDA, and the GPUs' UUIDs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        # No GPU is wanted, and a broken driver is no matter.
        return [], 0, 0, ()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], 0, 0, ()
    if cuda.cuInit(0) in (STUB_LIBRARY, NO_DEVICE):
        return [], 0, 0, ()
    _call(cuda, "cuInit", 0)
    count, device, version = (ctypes.c_int() for _ in range(3))
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    _call(cuda, "cuDriverGetVersion", ctypes.byref(version))
    kinds: list[str] = []
    uuids: list[str] = []
    capabilities: list[int] = []
    for index in range(count.value):
        name, figures = ctypes.create_string_buffer(256), [ctypes.c_int() for _ in range(3)]
        uuid = ctypes.create_string_buffer(16)
        _call(cuda, "cuDeviceGet", ctypes.byref(device), index)
        _call(cuda, "cuDeviceGetName", name, len(name), device)
        # Drivers before CUDA 11.4 have none, and are refused elsewhere.
        if hasattr(cuda, "cuDeviceGetUuid_v2") and cuda.cuDeviceGetUuid_v2(uuid, device) == 0:
            uuids.append(uuid.raw.hex())
        for figure, attribute in zip(figures, (MULTIPROCESSORS, CAPABILITY_MAJOR, CAPABILITY_MINOR), strict=True):
            _call(cuda, "cuDeviceGetAttribute", ctypes.byref(figure), attribute, device)
        processors, major, minor = (figure.value for figure in figures)
        # Kernels are chosen by both, and equal names do not promise equal GPUs: MIG and MPS show a part of one.
        kinds.append(f"{name.value.decode()} ({processors} SMs, capability {major}.{minor}) on {host}")
        capabilities.append(10 * major + minor)
    return kinds, min(capabilities, default=0), version.value, tuple(uuids)


def _call(cuda: Any, function: str, *arguments: object) -> None:
    """Call the GPUs' driver; raises MachineError if it fails, as the CPU must not take over in silence."""
    code = getattr(cuda, function)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        said = f"{function} failed with {code}, {text.value.decode() if text.value else 'an unknown error'}"
        raise MachineError(f"the GPU's driver does not work ({said}); see nvidia-smi, or set CUDA_VISIBLE_DEVICES= for CPUs")
