"""This process's control groups, of version 1 or 2: CPUs and memory they allow, and how often the kernel killed for want of memory."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MOUNTED, OWN, WHOLE_MACHINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat")


def memory_limit(mounted: Path = MOUNTED, own: Path = OWN) -> int | None:
    """Return the lowest limit, in bytes, of this process's control group and those above it; None without one."""
    limits: list[int] = []
    for group, version in _groups("memory", mounted, own):
        # "max" where there is no limit.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((group / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text()))
    return min(limits, default=None)


def oom_kills(mounted: Path = MOUNTED, own: Path = OWN, whole_machine: Path = WHOLE_MACHINE) -> int:
    """Return how many processes of this control group the kernel has OOM-killed; of the machine where no group counts them."""
    counters = [group / ("memory.events" if version == 2 else "memory.oom_control") for group, version in _groups("memory", mounted, own)]
    for path in (*counters, whole_machine):
        with contextlib.suppress(OSError):
            fields = path.read_text().split()
            if "oom_kill" in fields:
                return int(fields[fields.index("oom_kill") + 1])
    return 0


class OomKills:
    """Notices that the kernel has killed a process for lack of memory."""

    def __init__(self) -> None:
        self._count, self._noticed_at = oom_kills(), -60.0

    def noticed_at(self, now: float) -> float:
        """Look, and return when the newest one was noticed."""
        before, self._count = self._count, oom_kills()
        self._noticed_at = now if self._count > before else self._noticed_at
        return self._noticed_at


# What a task has, and the job on this machine.
SLURM_CPUS = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")


def usable_cpus(mounted: Path = MOUNTED, own: Path = OWN) -> int:
    """Return how many CPUs this process may use: those it is bound to, or what a control group or Slurm allows of them."""
    shares: list[float] = [len(os.sched_getaffinity(0))]
    # A Slurm without a TaskPlugin binds nobody.
    shares += [int(said) for name in SLURM_CPUS if (said := os.environ.get(name, "")).isdigit()]
    for group, version in _groups("cpu", mounted, own):
        # "max", or -1, where there is no limit.
        with contextlib.suppress(OSError, ValueError):
            names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
            shares += [quota / period] if quota > 0 else []
    return max(1, int(min(shares)))


def _groups(controller: str, mounted: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """The folders of this process's groups of a controller from the innermost out, with their version.

    A container sees its own group as the topmost, so most of these folders need not be there.
    """
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = mounted / controller if controllers else mounted
            for group in (Path(path), *Path(path).parents):
                yield root / group.relative_to("/"), 1 if controllers else 2
