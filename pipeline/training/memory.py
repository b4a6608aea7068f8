"""A rank's memory: what its data may take of a GPU's, and what the host's allocator does with what was freed."""

import ctypes
import os
import sys

import psutil
import torch

from pipeline.hardware.cgroup import memory_limit

# Of glibc's mallopt.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let malloc use freed memory again: by default glibc gives large blocks back, and every step pays their page faults anew."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        # As a size: the largest there is.
        mallopt(M_TRIM_THRESHOLD, -1)


def free_bytes(device: torch.device) -> int:
    """Return this rank's share of a GPU's free memory; for a CPU what the machine has, as ranks share what they map."""
    if device.type == "cpu":
        return min(psutil.virtual_memory().available, memory_limit() or sys.maxsize)
    sharing = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.cuda.device_count())
    return torch.cuda.mem_get_info(device)[0] // sharing
