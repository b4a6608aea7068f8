"""The protocol of an elastic job's ranks, by their own code but in simulated time: every fault at every point, and many at random."""

import os
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from pipeline.elastic.generations import Coordinator, Member
from tests.kit.generations import FAULTS, Job, explore

# LOCKSTEP_SCHEDULES=100000 explores so many at random, and every point of every size.
CAMPAIGN = int(os.environ.get("LOCKSTEP_SCHEDULES", "0"))


def judge(jobs: Iterator[Job], record_property: Any) -> None:
    """Fail with the first schedules that go wrong, and say how many there were."""
    count, hurt, wrong = 0, 0, list[str]()
    for job in jobs:
        count, hurt = count + 1, hurt + len(job.faults)
        wrong += job.world.violations
        if len(wrong) > 4:
            break
    print(f"{count} schedules with {hurt} faults")
    record_property("schedules", count)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_fault_at_every_point(ranks: int, record_property: Any) -> None:
    """Of two ranks at every point; of others, but in a campaign, at every 13th."""
    stride = 1 if ranks == 2 or CAMPAIGN else 13
    points = range(1, explore(ranks).world.points, stride)
    judge((explore(ranks, {point: (kind, number)}) for kind in FAULTS for number in range(ranks) for point in points), record_property)


def schedule(seed: int) -> Job:
    """One to five faults at random points, in a random order of processes."""
    random = Random(seed)
    ranks = random.randint(1, 4)
    length = explore(ranks).world.points if seed % 50 == 0 else 400
    plan = {random.randint(1, 2 * length): (random.choice([*FAULTS]), random.randrange(ranks)) for _ in range(random.randint(1, 5))}
    return explore(ranks, plan, random)


def test_several_faults_at_random(record_property: Any) -> None:
    judge((schedule(seed) for seed in range(CAMPAIGN or 300)), record_property)


def test_a_coordinator_that_leaves_out_who_holds_the_weights_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Coordinator._read

    def newest_first(self: Coordinator) -> None:
        read(self)
        self._ready.sort(key=lambda name: -int(name.rpartition("-")[2]))

    monkeypatch.setattr(Coordinator, "_read", newest_first)
    assert any("writes, and" in one for seed in range(40) for one in schedule(seed).world.violations)


def stuck(fault: str) -> bool:
    """Whether a fault at some point leaves ranks waiting for ever."""
    return any("still running" in one for point in range(20, 120) for one in explore(2, {point: (fault, 0)}).world.violations)


def test_ranks_that_do_not_ask_for_another_generation_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not stuck("disconnect")
    monkeypatch.setattr(Member, "failed", lambda self: None)
    assert stuck("disconnect")


def test_ranks_of_which_some_enter_a_generation_that_others_leave_out_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Member, "_is_entered", lambda self, generation, wish: wish)
    assert any("still running" in one for seed in range(300) for one in schedule(seed).world.violations)
