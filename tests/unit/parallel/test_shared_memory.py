"""Sums and questions in memory that ranks share: the bits of one tree, no wait for what is there, and an error where nobody comes."""

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
from pipeline.parallel.lanes import Lanes, TreeNode, push
from pipeline.parallel.ordered import add
from pipeline.parallel.shared_memory import MOST_GATHERED_BYTES, NAME, PAGE_BYTES, QUESTIONS_KEPT, SharedMemory
from pipeline.ranks import Ranks
from tests.kit.skips import NOT_BOUND
from tests.ranks.test_strategies import with_strategy
from tests.unit.parallel.test_ordered import leaf, tree

pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason=NOT_BOUND)
SIZES = [1, 2, 3, 7, 64, 1001]
SHARES = [[1, 1], [4, 4], [1, 3], [1, 3, 2, 2], [2, 3, 3], [1] * 6]
STEPS = 5


def shared(group: Ranks, lanes: Lanes, dtype: torch.dtype = torch.float32) -> Any:
    """What sums gradients and buffers of some sizes."""
    group.bound = True
    model = nn.ParameterList([nn.Parameter(torch.empty(size, dtype=dtype)) for size in SIZES])
    found = shared_sums.build(model, lanes, group, Dist.model_construct())
    assert found is not None and group.shared is not None
    return found[0]


def summed(group: Ranks, per_rank: list[int], dtype: torch.dtype) -> list[list[Tensor]]:
    """The sums of some steps, which overlap as buckets do; now one rank is late and now another."""
    lanes = Lanes(per_rank, group.rank, sum(per_rank))
    reduction, steps = shared(group, lanes, dtype), []
    for step in range(STEPS):
        under_way, outs = list[Any](), list[Tensor]()
        for size in SIZES:
            time.sleep(0.002 * ((step + size) % group.size == group.rank))
            stack: list[TreeNode[Tensor]] = []
            for lane in lanes.own:
                push(stack, (lane, 1, leaf(size, lane + step, dtype)), add)
            own = stack[-1][2]
            outs.append(own if size % 2 else torch.empty(size, dtype=dtype))
            place = reduction.place(own)
            assert (place is own) == (len(stack) > 1), "one that is alone may be made where the others read it"
            stack[-1] = *stack[-1][:2], place.copy_(own) if step % 2 else own
            for one in under_way:
                reduction.advance(one)
            under_way.append(reduction.scatter(stack, outs[-1]))
        for one, out in zip(under_way, outs, strict=True):
            assert reduction.result(one) is out
        steps.append([out.clone() for out in outs])
    return steps


@pytest.mark.parametrize("per_rank", SHARES, ids=str)
def test_sums_have_the_bits_of_one_tree(per_rank: list[int], run_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for (steps,) in run_ranks(len(per_rank), (summed, (per_rank, dtype))):
            for step, sums in enumerate(steps):
                for size, total in zip(SIZES, sums, strict=True):
                    monkeypatch.setattr("tests.unit.parallel.test_ordered.leaf", lambda *at, by=step: leaf(at[0], at[1] + by, at[2]))
                    assert torch.equal(total, tree(size, sum(per_rank), dtype))
                    monkeypatch.undo()


def trained(group: Ranks, bound: bool, model: str, per_rank: list[int]) -> str:
    group.bound, group.shared = bound, None
    digest, _, _ = with_strategy(group, "ddp", "ordered", model, per_rank, False, steps=3)
    assert (group.shared is not None) == bound
    return digest


@pytest.mark.parametrize("model", ["lenet", "torchvision:mobilenet_v3_small"])
def test_a_training_has_the_bits_of_one_that_sends_messages(model: str, run_ranks: Any) -> None:
    # BatchNorm's statistics too.
    digests = [
        one
        for per_rank in ([2, 2], [3, 1])
        for found in run_ranks(2, *((trained, (way, model, per_rank)) for way in (False, True)))
        for one in found
    ]
    assert len(set(digests)) == 1 and len(digests) == 8


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
