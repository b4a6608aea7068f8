"""Rows and questions in memory that ranks share: no wait for what is there, and an error where nobody comes."""

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import collectives
from pipeline.config import Dist
from pipeline.parallel import shared_memory, shared_sums
from pipeline.parallel.lanes import Lanes
from pipeline.parallel.shared_memory import MOST_GATHERED_BYTES, NAME, PAGE_BYTES, QUESTIONS_KEPT, SharedMemory
from pipeline.ranks import Ranks
from tests.kit.skips import NOT_BOUND
from tests.unit.parallel.test_shared_sums import shared

pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason=NOT_BOUND)


def asked(group: Ranks) -> list[int]:
    """The answers to many questions, of which one waits, as that whether to stop does, while others are asked and answered."""
    shared(group, Lanes([1] * group.size, group.rank, group.size))
    found: list[int] = []
    for number in range(3 * QUESTIONS_KEPT):
        outer = group.start_maximum((number + group.rank) % 7)
        if number % group.size == group.rank:
            time.sleep(0.0005)
        found.append(int(group.start_logical_or(number % 5 == group.rank)()))
        found.append(outer())
    return found


def test_questions_are_answered_in_any_order(run_ranks: Any) -> None:
    right = [
        answer for number in range(3 * QUESTIONS_KEPT) for answer in (int(number % 5 < 3), max((number + rank) % 7 for rank in range(3)))
    ]
    assert [found for (found,) in run_ranks(3, (asked, ()))] == [right] * 3


def gathered(group: Ranks, size: int) -> list[Tensor]:
    """Rows of unequal number, many times, and now one rank late and now another."""
    shared(group, Lanes([1] * group.size, group.rank, group.size))
    memory: Any = group.shared
    wait, found = memory.wait, list[Tensor]()

    def late(word: int, value: int) -> None:
        wait(word, value)
        # The others go on meanwhile, and write again.
        time.sleep(0.002 * (value % group.size == group.rank))

    memory.wait = late
    if size < 100:
        dist.all_gather_single = lambda *_, **__: pytest.fail("a message was sent")
    for number in range(50):
        rows = torch.full((group.rank + 1, size), 10 * number + group.rank, dtype=torch.float64)
        found.append(group.gather_rows(rows, [1, 2, 3]))
    return found


@pytest.mark.parametrize("size", [6, MOST_GATHERED_BYTES], ids=["small", "too large"])
def test_rows_of_all_ranks_are_gathered_in_their_order(size: int, run_ranks: Any) -> None:
    for (found,) in run_ranks(3, (gathered, (size,))):
        for number, rows in enumerate(found):
            assert rows.shape == (6, size)
            assert rows[:, 0].tolist() == rows[:, -1].tolist() == [10 * number + rank for rank in (0, 1, 1, 2, 2, 2)]


def unbound(group: Ranks) -> bool:
    """Whether all do without, where the kernel has refused to bind one."""
    group.bound = group.rank == 0
    without = shared_sums.build(nn.Linear(2, 2), Lanes([1, 1], group.rank, 2), group, Dist.model_construct()) is None
    return without and group.shared is None


def test_where_one_rank_is_not_bound_all_send_messages(run_ranks: Any) -> None:
    assert run_ranks(2, (unbound, ())) == [[True], [True]]


def not_had(group: Ranks, rank: int) -> bool:
    """Whether all do without, where one cannot have it."""
    broken = "memfd_create" if rank == 0 else "pidfd_open"
    if group.rank == rank:
        # As where Python was built for an older system.
        delattr(os, broken)
    group.bound = True
    without = shared_sums.build(nn.Linear(2, 2), Lanes([1, 1], group.rank, 2), group, Dist.model_construct()) is None
    return without and group.shared is None


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_cannot_have_it_all_send_messages(rank: int, run_ranks: Any) -> None:
    assert run_ranks(2, (not_had, (rank,))) == [[True], [True]]


@pytest.mark.parametrize("local", ["1", "2"])
@pytest.mark.parametrize("setting", [{"algorithm": "flat"}, {"nodes": 2}, {}], ids=str)
def test_nothing_is_shared_unless_all_ranks_are_of_one_machine(
    setting: dict[str, Any], local: str, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(shared_sums, "share", lambda *_: pytest.fail("shared"))
    two = Ranks(0, 2, alone.device, alone.control, bound=True)
    if local == "2" and not setting:
        with pytest.raises(pytest.fail.Exception):
            shared_sums.build(nn.Linear(2, 2), Lanes([1, 1], 0, 2), two, Dist.model_construct())
        monkeypatch.setattr(collectives, "in_vain", threading.Event())
    assert shared_sums.build(nn.Linear(2, 2), Lanes([1, 1], 0, 2), two, Dist.model_construct(**setting)) is None


def test_so_much_that_each_rank_would_read_more_than_messages_carry_is_sent(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(shared_memory, "MOST_BYTES", 100)
    two = Ranks(0, 2, alone.device, alone.control, bound=True)
    assert shared_sums.build(nn.Linear(2, 2), Lanes([1, 1], 0, 2), two, Dist.model_construct()) is None


@pytest.fixture
def peer() -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def beside(alone: Ranks, pid: int, timeout_seconds: float) -> tuple[SharedMemory, memoryview]:
    """This process as rank 0, another one as rank 1, and that one's page."""
    mapped = mmap.mmap(-1, 2 * (PAGE_BYTES + 2 * MOST_GATHERED_BYTES))
    ranks = Ranks(0, 2, alone.device, alone.control)
    memory = SharedMemory(ranks, mapped, 2 * MOST_GATHERED_BYTES, [os.getpid(), pid], timeout_seconds)
    return memory, memoryview(mapped).cast("q")[PAGE_BYTES // 8 :]


def test_whoever_waits_for_a_rank_that_has_ended_hears_of_it_at_once(peer: "subprocess.Popen[bytes]", alone: Ranks) -> None:
    memory, page = beside(alone, peer.pid, 60)
    # What it wrote before its end counts.
    page[0] = 3
    peer.kill()
    # Also while nobody has waited for it.
    os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)
    memory.wait(0, 3)
    started_at = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer"):
        memory.wait(0, 4)
    assert time.monotonic() - started_at < 1


def test_whoever_waits_for_a_rank_that_hangs_gives_up_in_time(peer: "subprocess.Popen[bytes]", alone: Ranks) -> None:
    memory, _ = beside(alone, peer.pid, 0.2)
    with pytest.raises(RuntimeError, match=r"^Timed out waiting 0 s for another rank"):
        memory.wait(0, 1)


def test_a_long_wait_takes_little_of_the_cpu(peer: "subprocess.Popen[bytes]", alone: Ranks) -> None:
    memory, _ = beside(alone, peer.pid, 1)
    before = time.process_time()
    with pytest.raises(RuntimeError, match=r"^Timed out"):
        memory.wait(0, 1)
    assert time.process_time() - before < 0.3


def held(group: Ranks) -> tuple[int, bool]:
    """How many files of this process are the memory, and whether it is mapped."""
    kept = shared(group, Lanes([1, 1], group.rank, 2))
    files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert kept is not None
    return sum(NAME in file for file in files), NAME in Path("/proc/self/maps").read_text()


def test_the_memory_is_held_by_its_mapping_alone(run_ranks: Any) -> None:
    # Which keeps a file of its own.
    assert run_ranks(2, (held, ())) == [[(1, True)]] * 2
