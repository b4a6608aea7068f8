"""Trainings of one machine share out its GPUs: no two have the same one, and a killed one has none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.hardware import sharing
from pipeline.job import Job
from pipeline.launch.agent_command import environment
from pipeline.launch.node import Node
from tests.kit.experiment import ROOT, make_job

FOUR = ("aa", "bb", "cc", "dd")
HOLDER = """
import sys
from pipeline.hardware import sharing

def wait(free):
    sys.exit(f"{free} free")

with sharing.taken(sys.argv[2:], int(sys.argv[1]), wait) as numbers:
    print(*numbers, flush=True)
    sys.stdin.read()
"""


class Training:
    """Another process that takes GPUs."""

    def __init__(self, folder: Path, count: int):
        command = [sys.executable, "-c", HOLDER, str(count), *FOUR]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"TMPDIR": str(folder)}, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def has(self) -> str:
        """The numbers of its GPUs, or why it has none."""
        assert self.process.stdout is not None and self.process.stderr is not None
        return self.process.stdout.readline().strip() or self.process.stderr.read().strip()

    def end(self) -> None:
        self.process.communicate("")


def test_every_training_has_its_own_gpus_until_it_ends_or_is_killed(tmp_path: Path) -> None:
    first = Training(tmp_path, 1)
    assert first.has() == "0"
    third = Training(tmp_path, 2)
    assert third.has() == "1 2"
    fourth = Training(tmp_path, 2)
    assert fourth.has() == "1 free"
    first.process.kill()
    first.end()
    fifth = Training(tmp_path, 2)
    assert fifth.has() == "0 3"
    third.end()
    fifth.end()
    sixth = Training(tmp_path, 4)
    assert sixth.has() == "0 1 2 3"
    for one in (fourth, sixth):
        one.end()
    assert (tmp_path / "lockstep-locks").stat().st_mode & 0o7777 == 0o1777


def test_who_waits_takes_them_once_they_are_free_and_holds_none_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "lock_folder", lambda: tmp_path / "lockstep-locks")
    other = Training(tmp_path, 3)
    assert other.has() == "0 1 2"
    waited: list[int] = []

    def wait(free: int) -> None:
        waited.append(free)
        small = Training(tmp_path, 1)
        # The one that is free is nobody's.
        assert small.has() == "3"
        small.end()
        other.end()

    with sharing.taken(FOUR, 2, wait) as numbers:
        assert (numbers, waited) == ([0, 1], [1])


def job_on(device: str, folder: Path, **dist: object) -> Job:
    return make_job(folder, dist=dist).model_copy(update={"device": device})


@pytest.mark.parametrize(("strategy", "size", "expected"), [("ddp", 2, "1,2"), ("ddp", 1, "1"), ("dataparallel", 1, "waits")])
def test_ranks_see_the_gpus_that_their_training_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, size: int, expected: str
) -> None:
    monkeypatch.setattr(sharing, "lock_folder", lambda: tmp_path / "lockstep-locks")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(sharing.machine, "detect", lambda: type("Found", (), {"uuids": FOUR}))
    job = job_on("cuda", tmp_path, strategy=strategy, world_size=size)
    # No more than it has lanes.
    assert sharing.wanted(job.config.dist.model_copy(update={"lanes": 3}), 4) == (3 if strategy == "dataparallel" else size)

    def wait(why: str) -> None:
        raise InterruptedError(why)

    with sharing.gpus_taken(job_on("cuda", tmp_path, world_size=1), wait) as first:
        # The first ones are those that ranks take by themselves.
        assert first is None
        try:
            with sharing.gpus_taken(job, wait) as gpus:
                assert environment(Node.alone(job, gpus))["CUDA_VISIBLE_DEVICES"] == gpus == expected
        except InterruptedError as error:
            assert expected == "waits"
            assert "waiting for 4 of 4 GPUs, and other trainings on this machine leave 3; CUDA_VISIBLE_DEVICES chooses" in str(error)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with sharing.gpus_taken(job, wait) as chosen:
            assert chosen is None
            assert environment(Node.alone(job, chosen))["CUDA_VISIBLE_DEVICES"] == "0,1"
