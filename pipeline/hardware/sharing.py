"""Several trainings on one machine: each takes GPUs, and binds itself to CPUs, that no other one has."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline.config.sections import Dist
from pipeline.hardware import machine
from pipeline.job import Job


def lock_folder() -> Path:
    """Where every user's trainings lock GPUs and CPUs."""
    return Path(tempfile.gettempdir()) / "lockstep-locks"


@contextmanager
def gpus_taken(job: Job, wait: Callable[[str], None]) -> Generator[str | None]:
    """Take the GPUs of a job on this machine alone; yields CUDA_VISIBLE_DEVICES for its ranks, or None where they need none.

    Whoever has set CUDA_VISIBLE_DEVICES has chosen, and may let several trainings share a GPU.
    """
    uuids = () if job.device == "cpu" or "CUDA_VISIBLE_DEVICES" in os.environ else machine.detect().uuids
    count = wanted(job.config.dist, len(uuids))

    def waiting(free: int) -> None:
        of = f"{count} of {len(uuids)} GPUs, and other trainings on this machine leave {free}"
        wait(f"waiting for {of}; CUDA_VISIBLE_DEVICES chooses GPUs by hand, also shared ones")

    with taken(uuids, count, waiting) as numbers:
        yield None if numbers == list(range(count)) else ",".join(map(str, numbers))


def wanted(dist: Dist, gpus: int) -> int:
    """How many of these GPUs a training uses; nn.DataParallel's one process has a lane at least on each."""
    return min(dist.pieces if dist.strategy == "dataparallel" else dist.world_size, gpus)


@contextmanager
def taken(uuids: Sequence[str], count: int, wait: Callable[[int], None]) -> Generator[list[int]]:
    """Take so many GPUs, the first ones that nobody has, until the block ends; yields their numbers.

    All are taken or none: no two trainings wait for each other. `wait` is called with the number of free ones while there are too few.
    """
    with ExitStack() as locks:
        numbers = _try(uuids, count, locks)
        while len(numbers) < count:
            locks.close()
            wait(len(numbers))
            numbers = _try(uuids, count, locks)
        yield numbers


def take_cpus(cpus: Sequence[int], locks: ExitStack) -> bool:
    """Lock all of these CPUs, as long as the locks are held; returns False if one is taken, or nothing can be locked here."""
    try:
        return all(_lock(lock_folder() / f"cpu{cpu}", locks) for cpu in cpus)
    except OSError:
        return False


def _try(uuids: Sequence[str], count: int, locks: ExitStack) -> list[int]:
    """Lock the first `count` that are free, or as many as there are."""
    found: list[int] = []
    for number, uuid in enumerate(uuids):
        if len(found) < count and _lock(lock_folder() / uuid, locks):
            found.append(number)
    return found


def _lock(path: Path, locks: ExitStack) -> bool:
    """Lock a file if nobody has it; the kernel releases it when this process ends, however it ends."""
    file = _opened(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    locks.callback(os.close, file)
    return True


def _opened(path: Path) -> int:
    if not path.parent.exists():
        path.parent.mkdir(exist_ok=True)
        # For all users, who remove only their own: the umask took some of it.
        path.parent.chmod(0o1777)
    try:
        # To lock it, reading is enough; many systems refuse to create what is another user's.
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        file = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
        os.fchmod(file, 0o644)
        return file
