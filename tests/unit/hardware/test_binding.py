"""Ranks and CPUs: each on its own where they take all, anywhere else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.job import Job
from pipeline.tracking.journal import Silent
from pipeline.training import train_rank
from tests.kit.experiment import make_job

CPUS = sorted(os.sched_getaffinity(0))
# In a process of its own, as nothing makes up for it: one thread is there before, and one comes after.
BOUND = """
import json, os, sys
from pathlib import Path
from threading import Event, Thread
from pipeline.hardware.binding import bind_to_cpus
end = Event()
Thread(target=end.wait).start()
bind_to_cpus(sys.argv[1], int(sys.argv[2]))
Thread(target=end.wait).start()
print(json.dumps([sorted(os.sched_getaffinity(int(one.name))) for one in Path("/proc/self/task").iterdir()]))
end.set()
"""


def bound(ranks: int, rank: int, threads: int, device: str = "cpu") -> list[list[int]]:
    """What CPUs every thread of such a rank may use in the end."""
    environment = dict(os.environ, LOCAL_WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    return json.loads(subprocess.check_output([sys.executable, "-c", BOUND, device, str(threads)], env=environment))


@pytest.mark.parametrize("rank", range(len(CPUS)))
def test_ranks_of_one_thread_that_take_all_cpus_have_one_each(rank: int) -> None:
    assert bound(len(CPUS), rank, 1) == [[CPUS[rank]]] * 3


def test_a_rank_with_as_many_threads_as_there_are_cpus_has_them_all() -> None:
    assert bound(1, 0, len(CPUS)) == [CPUS] * 3


@pytest.mark.parametrize("ranks", [len(CPUS) + 1, 2 * len(CPUS)])
def test_ranks_that_are_more_than_the_cpus_run_anywhere(ranks: int) -> None:
    assert bound(ranks, 1, 1) == [CPUS] * 3


def test_ranks_that_compute_on_gpus_run_anywhere() -> None:
    assert bound(len(CPUS), 0, 1, "cuda") == [CPUS] * 3


def where_it_trains(group: Any, job: Job) -> list[int]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CPUS[: group.size])
    try:
        train_rank.train(job, group, Silent())
        return sorted(os.sched_getaffinity(0))
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("ranks", range(1, min(2, len(CPUS)) + 1))
def test_a_training_binds_its_ranks(ranks: int, tmp_path: Path, run_ranks: Any) -> None:
    job = make_job(tmp_path, data={"name": "synthetic:64"}, model__name="mlp", train__epochs=1, dist__world_size=ranks)
    assert run_ranks(ranks, (where_it_trains, (job,))) == [[[cpu]] for cpu in CPUS[:ranks]]
