"""This process's control groups, of version 1 or 2: the memory they allow, and how often the kernel killed for want of it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

MOUNTED, OWN, WHOLE_MACHINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat")


def memory_limit(mounted: Path = MOUNTED, own: Path = OWN) -> int | None:
    """Return the lowest limit, in bytes, of this process's control group and those above it; None without one."""
    limits: list[int] = []
    for group, version in _memory_groups(mounted, own):
        # "max" where there is no limit.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((group / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text()))
    return min(limits, default=None)


def oom_kills(mounted: Path = MOUNTED, own: Path = OWN, whole_machine: Path = WHOLE_MACHINE) -> int:
    """Return how many processes of this control group the kernel has OOM-killed; of the machine where no group counts them."""
    counters = [group / ("memory.events" if version == 2 else "memory.oom_control") for group, version in _memory_groups(mounted, own)]
    for path in (*counters, whole_machine):
        with contextlib.suppress(OSError):
            fields = path.read_text().split()
            if "oom_kill" in fields:
                return int(fields[fields.index("oom_kill") + 1])
    return 0


def _memory_groups(mounted: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """The folders of this process's memory groups from the innermost out, with their version.

    A container sees its own group as the topmost, so most of these folders need not be there.
    """
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = mounted / "memory" if controllers else mounted
            for group in (Path(path), *Path(path).parents):
                yield root / group.relative_to("/"), 1 if controllers else 2
