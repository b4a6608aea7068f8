"""Ranks and CPUs: each on its own where they take all, anywhere else."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pipeline.hardware import sharing
from pipeline.hardware.binding import own_cpus
from pipeline.hardware.cgroup import SLURM_CPUS, usable_cpus
from pipeline.job import Job
from pipeline.tracking.journal import Silent
from pipeline.training import train_rank
from tests.kit.experiment import make_job

T = TypeVar("T")
CPUS = sorted(os.sched_getaffinity(0))
# Under a quota nobody is bound.
OWN = {cpu: [cpu] if usable_cpus() == len(CPUS) else CPUS for cpu in CPUS}
# In a process of its own, as nothing makes up for it: one thread is there before, and one comes after.
BOUND = """
import json, os, sys
from pathlib import Path
from threading import Event, Thread
from pipeline.hardware.binding import bind_to_cpus
end = Event()
Thread(target=end.wait, daemon=True).start()
bind_to_cpus(sys.argv[1], int(sys.argv[2]), lambda mine: mine and sys.argv[3] == "True")
Thread(target=end.wait, daemon=True).start()
print(json.dumps([sorted(os.sched_getaffinity(int(one.name))) for one in Path("/proc/self/task").iterdir()]), flush=True)
sys.stdin.read()
"""


class Rank:
    """Such a rank of a training, until it is ended."""

    def __init__(self, folder: Path, ranks: int, rank: int, threads: int = 1, device: str = "cpu", others: bool = True):
        variables = {name: value for name, value in os.environ.items() if name not in SLURM_CPUS}
        variables |= {"LOCAL_WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "TMPDIR": str(folder)}
        words = [sys.executable, "-c", BOUND, device, str(threads), str(others)]
        self.process = subprocess.Popen(words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        # What CPUs every thread may use in the end.
        self.cpus: list[list[int]] = json.loads(self.process.stdout.readline())

    def end(self) -> list[list[int]]:
        self.process.communicate()
        return self.cpus


@pytest.mark.parametrize("rank", range(len(CPUS)))
def test_ranks_of_one_thread_that_take_all_cpus_have_one_each(rank: int, tmp_path: Path) -> None:
    assert Rank(tmp_path, len(CPUS), rank).end() == [OWN[CPUS[rank]]] * 3


def test_ranks_that_are_more_than_the_cpus_run_anywhere(tmp_path: Path) -> None:
    assert Rank(tmp_path, len(CPUS) + 1, 0).end() == [CPUS] * 3


def test_ranks_that_compute_on_gpus_run_anywhere(tmp_path: Path) -> None:
    assert Rank(tmp_path, len(CPUS), 0, device="cuda").end() == [CPUS] * 3


def test_another_training_on_the_same_machine_runs_anywhere_until_the_first_has_ended(tmp_path: Path) -> None:
    first = Rank(tmp_path, len(CPUS), 0)
    assert Rank(tmp_path, len(CPUS), 0).end() == [CPUS] * 3
    assert Rank(tmp_path, 1, 0, len(CPUS)).end() == [CPUS] * 3
    first.process.kill()
    assert first.end() == [OWN[CPUS[0]]] * 3
    assert Rank(tmp_path, len(CPUS), 0).end() == [OWN[CPUS[0]]] * 3


def test_ranks_whose_peers_have_no_cpus_to_themselves_run_anywhere_and_leave_theirs_to_others(tmp_path: Path) -> None:
    half = Rank(tmp_path, len(CPUS), 0, others=False)
    assert Rank(tmp_path, len(CPUS), 0).end() == [OWN[CPUS[0]]] * 3
    assert half.end() == [CPUS] * 3


def test_without_a_folder_for_locks_ranks_run_anywhere(tmp_path: Path) -> None:
    (tmp_path / "lockstep-locks").write_text("")
    assert Rank(tmp_path, len(CPUS), 0).end() == [CPUS] * 3


@pytest.mark.parametrize(
    ("cpus", "usable", "ranks", "rank", "threads", "own"),
    [
        ([0, 1, 2, 3], 4, 2, 1, 2, [2, 3]),
        ([1, 3, 5, 7], 4, 2, 0, 2, [1, 3]),
        ([1, 3, 5, 7], 4, 4, 3, 1, [7]),
        ([0, 1, 2, 3], 4, 1, 0, 4, [0, 1, 2, 3]),
        # Fewer, more, and all of them where a quota allows two.
        ([0, 1, 2, 3], 4, 2, 1, 1, []),
        ([0, 1, 2, 3], 4, 3, 1, 2, []),
        ([0, 1, 2, 3], 2, 4, 1, 1, []),
    ],
)
def test_cpus_are_shared_out_in_order_where_ranks_take_all(
    cpus: list[int], usable: int, ranks: int, rank: int, threads: int, own: list[int]
) -> None:
    assert own_cpus(cpus, usable, ranks, rank, threads) == own


def asked(group: Any, says: list[bool]) -> bool:
    return group.all_on_this_machine(says[group.rank])


def test_ranks_of_a_machine_agree(run_ranks: Any) -> None:
    assert run_ranks(2, (asked, ([True, True],)), (asked, ([True, False],)), (asked, ([False, True],))) == [[True, False, False]] * 2


def where_it_trains(group: Any, job: Job, folder: Path) -> list[list[int]]:
    for name in SLURM_CPUS:
        os.environ.pop(name, None)
    before, locks = os.sched_getaffinity(0), sharing.lock_folder
    os.sched_setaffinity(0, CPUS[: group.size])
    sharing.lock_folder = lambda: folder
    try:
        train_rank.train(job, group, Silent())
        return sorted(sorted(cpus) for cpus in of_threads(os.sched_getaffinity))
    finally:
        of_threads(lambda thread: os.sched_setaffinity(thread, before))
        sharing.lock_folder = locks


def of_threads(call: Callable[[int], T]) -> list[T]:
    """What a call returns for each thread; one may have ended meanwhile."""
    found: list[T] = []
    for one in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found.append(call(int(one.name)))
    return found


@pytest.mark.parametrize("ranks", range(1, min(2, len(CPUS)) + 1))
def test_a_training_binds_all_threads_of_its_ranks(ranks: int, tmp_path: Path, run_ranks: Any) -> None:
    job = make_job(tmp_path, data={"name": "synthetic:64"}, model__name="mlp", train__epochs=1, dist__world_size=ranks)
    for cpu, (threads,) in zip(CPUS, run_ranks(ranks, (where_it_trains, (job, tmp_path / "locks"))), strict=False):
        assert len(threads) > 1
        assert threads == [[cpu] if OWN[cpu] == [cpu] else CPUS[:ranks]] * len(threads)
