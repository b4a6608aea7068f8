"""The forming of a group, one of which is late, or no longer there."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.cluster.store import serve
from pipeline.elastic.generations import ADDRESSES_TOGETHER
from pipeline.hardware.network import listen
from tests.kit.experiment import ROOT

# Which of two ranks connects and which waits for that depends on their addresses; either is as likely.
GROUPS = 12
PROGRAM = """
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from pipeline.config import Config
from pipeline.elastic.generations import Generation
from pipeline.elastic.process_groups import LostPeer, ProcessGroups
from pipeline.heartbeat import Heartbeat
from pipeline.job import Job

name, store, folder, what = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]
job = Job(config=Config(), device="cpu", backend="gloo", precision="fp32", prepared=folder, run=folder)
groups = ProcessGroups(job, name, store, Heartbeat(folder))


def enter(number, groups=groups):
    groups.enter(Generation(number, ["leader:a.0", "leader:a.1"]))


if what == "dies":
    for number in range(GROUPS):
        if os.fork() == 0:
            os.write(1, b"c")
            enter(number, ProcessGroups(job, name, store, Heartbeat(folder)))
    time.sleep(600)
os.write(1, b"c")
input()
for number in range(GROUPS if what == "finds it dead" else 1):
    began = time.monotonic()
    try:
        enter(number)
    except LostPeer:
        print(time.monotonic() - began, flush=True)
    else:
        # Whoever left at once would close a connection that the other is still making.
        dist.barrier()
        print("formed", flush=True)
    if time.monotonic() > began + 1:
        break
groups.leave()
"""


class Rank:
    """One of two ranks, a process."""

    def __init__(self, number: int, store: str, folder: Path, what: str):
        place = folder / str(number)
        place.mkdir()
        words = [sys.executable, "-c", PROGRAM.replace("GROUPS", str(GROUPS)), f"leader:a.{number}", store, str(place), what]
        variables = os.environ | ADDRESSES_TOGETHER | {"TORCHELASTIC_RUN_ID": "job"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, cwd=ROOT, env=variables, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert self._process.stdout is not None
        # Until it is ready.
        self._process.stdout.read(GROUPS if what == "dies" else 1)

    def go(self) -> None:
        """Let it enter its groups."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def said(self) -> list[str]:
        """What it said, at its end."""
        return self._process.communicate(timeout=60)[0].split()

    def kill(self) -> None:
        """Kill it and all it has forked."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int, str], Rank]]:
    listening = listen(0, "127.0.0.1")
    port, ranks = listening.getsockname()[1], list[Rank]()
    _store = serve("127.0.0.1", port, listening)

    def begin(number: int, what: str) -> Rank:
        ranks.append(Rank(number, f"127.0.0.1:{port}", tmp_path, what))
        return ranks[-1]

    yield begin
    for one in ranks:
        with suppress(ProcessLookupError):
            one.kill()


Start = Callable[[int, str], Rank]


def test_a_group_is_given_up_soon_whose_other_rank_has_died_with_its_address_told(start: Start) -> None:
    other, rank = start(1, "dies"), start(0, "finds it dead")
    # Each of the other's processes tells its address, and waits for that of a rank that has not come.
    time.sleep(0.5)
    other.kill()
    rank.go()
    *at_once, last = map(float, rank.said())
    # Where it is to connect itself it hears at once that nobody listens.
    assert max(at_once, default=0) < 1 < last < 4


def test_a_group_is_given_up_soon_whose_other_rank_never_tells_its_address(start: Start) -> None:
    rank = start(0, "waits")
    rank.go()
    (seconds,) = map(float, rank.said())
    assert 1.5 < seconds < 4


def test_a_group_forms_with_a_rank_that_is_late(start: Start) -> None:
    ranks = [start(number, "waits") for number in range(2)]
    ranks[0].go()
    time.sleep(0.8)
    ranks[1].go()
    assert [one.said() for one in ranks] == [["formed"], ["formed"]]
