"""What machines are busy with: processor, memory and GPUs, in figures by the names that MLflow shows as system metrics."""

from pathlib import Path

import torch

from pipeline.ranks import Ranks

STAT, MEMINFO = Path("/proc/stat"), Path("/proc/meminfo")
MEGABYTE = 1e6


class Monitor:
    """Measures since the last log line; every rank must call it. One rank of a machine speaks for it, each for its own GPU and step."""

    def __init__(self, ranks: Ranks, nodes: int):
        self._ranks, self._per_node = ranks, ranks.size // nodes
        self._before = jiffies()

    def __call__(self, own_seconds: float) -> dict[str, float]:
        """Return the figures of all machines."""
        found: dict[str, float] = {}
        for rank, (seconds, busy, used, share, gpu_used, gpu_share) in enumerate(self._of_ranks(own_seconds)):
            node, local = divmod(rank, self._per_node)
            # MLflow's name for one of several machines.
            prefix = f"system/node_{node}" if self._ranks.size > self._per_node else "system"
            if local < 1:
                found[f"{prefix}/cpu_utilization_percentage"] = busy
                found[f"{prefix}/system_memory_usage_megabytes"] = used
                found[f"{prefix}/system_memory_usage_percentage"] = share
            if self._ranks.device.type == "cpu":
                # A GPU computes while its process has gone on.
                found[f"system/rank_{rank}_step_milliseconds"] = 1000 * seconds
            if gpu_used:
                found[f"{prefix}/gpu_{local}_memory_usage_megabytes"] = gpu_used
                found[f"{prefix}/gpu_{local}_memory_usage_percentage"] = gpu_share
        return found

    def _of_ranks(self, own_seconds: float) -> list[list[float]]:
        own = [own_seconds, self._busy(), *memory(), *gpu(self._ranks.device)]
        if self._ranks.size == 1:
            return [own]
        row = torch.tensor([own], dtype=torch.float64, device=self._ranks.device)
        return self._ranks.gather_rows(row, [1] * self._ranks.size).tolist()

    def _busy(self) -> float:
        """Percent of all cores' time since the last call; 0 where it cannot be known."""
        (idle, total), before = jiffies(), self._before
        self._before = idle, total
        return 100 * (1 - (idle - before[0]) / (total - before[1])) if total > before[1] else 0.0


def jiffies() -> tuple[int, int]:
    """Return for how long the cores of this machine have been idle, and all of their time."""
    if not STAT.exists():
        return 0, 0
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are within user.
    counts = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return counts[3] + counts[4], sum(counts)


def memory() -> tuple[float, float]:
    """Return how much of the machine's memory is in use, in megabytes and percent."""
    if not MEMINFO.exists():
        return 0.0, 0.0
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in MEMINFO.read_text().splitlines()}
    total, free = kilobytes["MemTotal"], kilobytes["MemAvailable"]
    return (total - free) * 1024 / MEGABYTE, 100 * (1 - free / total)


def gpu(device: torch.device) -> tuple[float, float]:
    """Return how much of a GPU's memory is in use, by whomever, in megabytes and percent; 0 without one."""
    if device.type != "cuda":
        return 0.0, 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / MEGABYTE, 100 * (1 - free / total)
