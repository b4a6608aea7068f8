"""A library in the place of the GPUs' driver, which says what a test tells it to."""

import shutil
import subprocess
from pathlib import Path

import pytest

CODE = """
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) { sleep(SECONDS); return INIT; }
int cuDriverGetVersion(int *version) { *version = DRIVER; return 0; }
int cuDeviceGetCount(int *count) { *count = GPUS; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strcpy(name, NAME); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 16 ? SMS : attribute == 75 ? CAPABILITY / 10 : attribute == 76 ? CAPABILITY % 10 : -1;
    return ATTRIBUTES;
}
#if UUID
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, UUID + device, 16); return 0; }
#endif
int cuGetErrorString(int code, const char **text) { *text = "the reason"; return 0; }
"""


def driver(folder: Path, **changes: int) -> dict[str, str]:
    """The variables that put a driver of two H200 in the driver's place; `driver(folder, INIT=802)` has one that does not start."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cuda.c").write_text(CODE)
    values = {"INIT": 0, "DRIVER": 13000, "GPUS": 2, "SMS": 132, "CAPABILITY": 90, "ATTRIBUTES": 0, "UUID": 17, "SECONDS": 0} | changes
    words = [*(f"-D{name}={value}" for name, value in values.items()), '-DNAME="NVIDIA H200"']
    subprocess.run(["gcc", "-shared", "-fPIC", *words, "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return {"LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": "0,1"}
