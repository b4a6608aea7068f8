"""Which share of a GPU's memory a rank takes for its data, where a GPU's allocator is stood in for; and the host's allocator."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.data import Split
from pipeline.data.batches import resident
from pipeline.training import memory
from pipeline.training.memory import free_bytes
from tests.kit.experiment import ROOT, make_job

GPU = torch.device("cuda")
GIB = 2**30


@pytest.mark.parametrize(("ranks", "gpus", "share"), [(1, 1, 6), (2, 2, 6), (3, 1, 2), (3, 2, 3), (4, 2, 3)])
def test_ranks_that_share_a_gpu_share_its_free_memory(ranks: int, gpus: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6 * GIB, 80 * GIB))
    assert free_bytes(GPU) == share * GIB


def test_the_splits_together_take_half_of_it_at_most() -> None:
    training, validation = (Split(np.zeros((count, 1, 4, 4), np.uint8), np.zeros(count, np.int64)) for count in (9, 1))
    assert resident([training, validation], 2 * 160)
    assert not resident([training, validation], 2 * 160 - 1)
    assert resident([training], 2 * 144)


@pytest.mark.parametrize(("available", "limit", "free"), [(5, None, 5), (5, 9, 5), (5, 3, 3)])
def test_a_cpu_has_what_the_machine_has_or_its_control_group_allows(
    available: int, limit: int | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: limit)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    assert free_bytes(torch.device("cpu")) == free


FAULTS = """
import resource, sys
import torch
from pipeline.training.train_rank import run_as_rank

def count(_):
    for _ in range(10):
        torch.zeros(1 << 23).add_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(1 << 23).add_(1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if sys.argv[1:]:
    run_as_rank(count)
else:
    count(None)
"""


def faults(*job: str) -> int:
    words = [sys.executable, "-c", FAULTS, *job]
    return int(subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_a_rank_freed_costs_no_page_faults_when_it_is_taken_again(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text(make_job(tmp_path).model_dump_json())
    # 32 MiB are 8,192 pages, each time; or fewer, huge ones.
    assert faults(str(job)) < 20 < faults()
