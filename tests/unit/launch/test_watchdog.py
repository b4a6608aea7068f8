"""Who stands still, who never began, and whom nobody should wait for."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipeline import heartbeat
from pipeline.launch import watchdog
from pipeline.launch.failures import HUNG, Failure
from pipeline.launch.watchdog import Watchdog
from tests.kit.experiment import LONGER, ROOT, Experiment
from tests.kit.trainings import same_figures, wait_for_step
from tests.kit.waiting import until

Note = Callable[[str, object], None]
# A process with a rank's heartbeat, and with nothing else of it: `computing`, `outside`, `writing` and so on, in a step.
RANK = """
import os, sys, time
from pathlib import Path
from pipeline.heartbeat import FINISHING, Heartbeat
folder, doing, step = Path(os.environ["FOLDER"]), *sys.argv[1:]
heartbeat = Heartbeat(folder)
heartbeat.set_rank(int(folder.name))
heartbeat.computing(int(step))
if doing == "finishing":
    # As where writing hangs, and the thread that beats with it.
    heartbeat._show(FINISHING)
elif doing == "writing":
    with heartbeat.beating():
        time.sleep(100)
elif doing == "outside":
    while True:
        heartbeat.outside()
        time.sleep(0.2)
elif doing == "waking up":
    heartbeat.waiting()
    time.sleep(8)
    heartbeat.computing(int(step) + 1)
elif doing != "computing":
    getattr(heartbeat, doing)()
time.sleep(100)
"""
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(local_rank, doing, step)`: a process that looks like a rank."""
    started: list[subprocess.Popen[bytes]] = []

    def one(local: int, doing: str, step: int) -> "subprocess.Popen[bytes]":
        folder = tmp_path / "job" / "attempt_0" / str(local)
        folder.mkdir(parents=True)
        # Nothing of its title is the run's, as there is no room in that of a spawned one.
        words = [sys.executable, "-c", RANK, doing, str(step)]
        started.append(subprocess.Popen(words, cwd=ROOT, env=os.environ | {"FOLDER": str(folder)}))
        until((folder / "heartbeat").exists, started[-1])
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()


def watching(folder: Path, ranks: int, others: bool, limit_seconds: float, say: Callable[[str], None] = lambda _: None) -> Watchdog:
    """A watchdog of the ranks that `start` has started."""
    dog = Watchdog(folder, ranks, others, limit_seconds, say)
    dog.started(folder / "job" / "attempt_0")
    return dog


def verdict(dog: Watchdog, seconds: float = 30) -> Failure:
    """What the watchdog says, sooner or later."""
    return until(dog.check, seconds=seconds, every_seconds=0.05)


def test_the_rank_that_all_wait_for_is_named_with_all_stacks(start: Start, tmp_path: Path) -> None:
    said: list[str] = []
    start(0, "waiting", 7)
    start(1, "computing", 7)
    failure = verdict(watching(tmp_path, 2, False, 1.0, said.append))
    assert (failure.rank, failure.step, failure.exit_code, failure.waiting) == (1, 7, HUNG, False)
    assert "rank 1 stands still in step 7" in failure.cause
    assert len(said) == 1 and "may be for 1 s (dist.timeout_seconds)" in said[0]
    stacks = [path.read_text() for path in tmp_path.rglob("stacks.log")]
    assert len(stacks) == 2
    assert all("most recent call first" in one for one in stacks)


def test_another_process_with_the_pid_of_a_lost_rank_is_no_rank(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(0, "computing", 7)
    dog = watching(tmp_path, 1, True, 0.5)
    until(lambda: dog.check() or dog._alive, seconds=30, every_seconds=0.05)
    # Its pid stays, and psutil finds a process that began at another time.
    monkeypatch.setattr(psutil.Process, "_get_ident", lambda self: (self.pid, -1.0))
    end = time.monotonic() + 3
    while time.monotonic() < end:
        assert dog.check() is None
        time.sleep(0.05)
    assert not dog._alive


def test_a_warning_of_a_rank_that_stands_still_does_not_use_up_that_of_a_slow_one(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "SLOW_SECONDS", 3)
    said: list[str] = []
    start(0, "waiting", 7)
    start(1, "computing", 7)
    dog = watching(tmp_path, 2, False, 8.0, said.append)
    until(lambda: dog.check() or len(said) == 2, seconds=30, every_seconds=0.05)
    assert "rank 1 stands still in step 7" in said[0]
    assert "rank 1 is slow: the others wait for it" in said[1]


def test_a_rank_that_never_begins_is_noticed(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "START_SECONDS", 2)
    start(0, "waiting", 0)
    started_at = time.monotonic()
    failure = verdict(watching(tmp_path, 2, False, 0.1, lambda _: None))
    assert time.monotonic() - started_at > 2, "who has yet to import torch has longer than a step"
    assert failure.rank is None
    assert "1 of 2 ranks here have not begun" in failure.cause


@pytest.mark.parametrize(("doing", "step"), [("finishing", 7), ("computing", -1), ("waiting", -1)])
def test_who_begins_and_who_writes_the_model_is_given_longer_than_a_step(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str, step: int
) -> None:
    monkeypatch.setattr(watchdog, "START_SECONDS", 2)
    start(0, doing, step)
    started_at = time.monotonic()
    verdict(watching(tmp_path, 1, False, 0.1, lambda _: None))
    assert time.monotonic() - started_at > 2


@pytest.mark.fault(38, "a file that takes longer to write than a rank may stand still")
def test_who_writes_a_large_file_is_never_called_hung(start: Start, tmp_path: Path) -> None:
    start(0, "writing", 7)
    start(1, "waiting", 7)
    dog = watching(tmp_path, 2, False, 2.5)
    until = time.monotonic() + 7
    while time.monotonic() < until:
        assert dog.check() is None
        time.sleep(0.05)


def test_a_rank_that_waits_for_another_machine_is_no_cause_and_can_be_ended(start: Start, tmp_path: Path) -> None:
    processes = [start(0, "waiting", 7), start(1, "waiting", 7)]
    dog = watching(tmp_path, 2, True, 1.0, lambda _: None)
    failure = verdict(dog)
    assert failure.waiting and failure.is_consequence
    assert "waits in step 7 for another machine's" in failure.cause
    dog.kill_ranks()
    assert [process.wait(5) for process in processes] == [-9, -9]


def test_who_has_got_on_since_is_not_ended_and_can_hang_again(start: Start, tmp_path: Path) -> None:
    process = start(0, "waking up", 7)
    dog = watching(tmp_path, 1, True, 0.5, lambda _: None)
    assert verdict(dog).waiting
    deadline = time.monotonic() + 30
    while heartbeat.read(tmp_path / "job" / "attempt_0" / "0").step == 7:
        assert time.monotonic() < deadline
    # Sees it.
    time.sleep(1)
    assert dog.check() is None
    dog.kill_ranks()
    assert process.poll() is None
    assert verdict(dog).step == 8
    dog.kill_ranks()
    assert process.wait(5) == -9


def test_a_machine_that_only_leaves_waits_for_the_one_that_writes_the_model(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "START_SECONDS", 2)
    for doing, waits in (("leaving", True), ("finishing", False)):
        start(0, doing, 7)
        started_at = time.monotonic()
        failure = verdict(watching(tmp_path, 1, True, 0.1, lambda _: None))
        assert time.monotonic() - started_at > 2
        assert failure.waiting is waits
        shutil.rmtree(tmp_path / "job")


@pytest.mark.parametrize("step", [7, -1])
def test_a_rank_outside_of_any_group_does_not_hide_one_that_hangs(start: Start, tmp_path: Path, step: int) -> None:
    start(0, "outside", step)
    start(1, "computing", 7)
    failure = verdict(watching(tmp_path, 2, False, 1.0))
    assert (failure.rank, failure.step) == (1, 7)
    assert "rank 1 stands still in step 7" in failure.cause
    assert len(list(tmp_path.rglob("stacks.log"))) == 2


@pytest.mark.parametrize("others", [False, True])
def test_ranks_may_wait_for_a_group_for_ever_but_one_that_hangs_there_is_named(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    monkeypatch.setattr(watchdog, "QUIET_SECONDS", 2)
    ranks = [start(0, "outside", 7), start(1, "outside", 7)]
    dog = watching(tmp_path, 2, others, 0.5)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        assert dog.check() is None
        time.sleep(0.05)
    ranks[1].send_signal(signal.SIGSTOP)
    failure = verdict(dog)
    assert (failure.rank, failure.exit_code, failure.waiting) == (1, HUNG, False)


@pytest.mark.slow
@pytest.mark.fault(5, "the whole job stopped for 8 s, as by `docker pause`, with a timeout of 5 s")
def test_a_job_that_slept_as_a_whole_goes_on(baseline: Experiment, experiment: Experiment, record_property: Note) -> None:
    experiment.set(**LONGER, dist__timeout_seconds=5).run("prepare")
    process = experiment.start("train")
    wait_for_step(experiment, 30, process)
    asleep = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in reversed(asleep):
        one.suspend()
    time.sleep(8)
    for one in asleep:
        one.resume()
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "starting again" not in said
    assert "stands still" not in said
    same_figures(experiment, baseline)
    record_property("happened", "no timeout, no restart, bit-equal")
