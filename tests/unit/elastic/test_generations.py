"""The protocol of an elastic job's ranks, by their own code but in simulated time: every fault at every point, and many at random."""

import os
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from torch.distributed import HashStore

from pipeline.cluster.messages import MEMBERS
from pipeline.cluster.store import ClusterStore
from pipeline.elastic import coordinator as coordinators
from pipeline.elastic.coordinator import Coordinator
from pipeline.elastic.generations import Member, heartbeat_of
from tests.kit.generation_faults import FAULTS, MACHINE_FAULTS
from tests.kit.generations import Job, explore

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


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (1, 2), (2, 1)])
def test_every_fault_of_a_machine_at_every_point(ranks: int, workers: int, record_property: Any) -> None:
    """Of two machines with a rank each at every third point; of others, but in a campaign, at every 29th."""
    stride, kinds = 3 if ranks + workers == 2 else 29, (*MACHINE_FAULTS, "kill", "kill all but one")
    points = range(1, explore(ranks, workers=workers).world.points, 1 if CAMPAIGN else stride)
    numbers = range(ranks * (1 + workers))
    judge((explore(ranks, {at: (kind, number)}, workers=workers) for kind in kinds for number in numbers for at in points), record_property)


def schedule(seed: int, most_workers: int = 0) -> Job:
    """One to five faults at random points, in a random order of processes."""
    random = Random(seed)
    ranks, workers = random.randint(1, 4 if most_workers == 0 else 2), random.randint(0, most_workers)
    kinds = [*FAULTS, *(MACHINE_FAULTS if workers else ())]
    length = 400 * (1 + workers)
    number = ranks * (1 + workers)
    plan = {random.randint(1, 2 * length): (random.choice(kinds), random.randrange(number)) for _ in range(random.randint(1, 5))}
    # Some more ranks than lanes, at times.
    return explore(ranks, plan, random, workers, number - 1 if seed % 5 == 0 and number > 1 else None)


def test_several_faults_at_random(record_property: Any) -> None:
    judge((schedule(seed, most_workers=3 * (seed % 2)) for seed in range(CAMPAIGN or 400)), record_property)


def test_a_coordinator_that_leaves_out_who_holds_the_weights_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Coordinator._read

    def newest_first(self: Coordinator, now: float) -> None:
        read(self, now)
        self._ready.sort(key=lambda name: -int(name.rpartition(".")[2]))

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


def test_a_coordinator_that_waits_for_a_machine_that_is_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(point: int) -> bool:
        return not any("still running" in one for one in explore(1, {point: ("lose", 1)}, workers=1).world.violations)

    assert all(map(ends, range(60, 120, 5)))
    monkeypatch.setattr(Coordinator, "_keep", lambda self, is_there: None)
    assert not all(map(ends, range(60, 120, 5)))


class Passing:
    """A clock whose time passes only where somebody sleeps, who meanwhile does something else."""

    def __init__(self) -> None:
        self.now, self.meanwhile = 0.0, list[Callable[[], object]]()

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds
        for one in self.meanwhile:
            one()


def test_a_rank_whose_machine_was_silent_comes_back() -> None:
    store, clock = ClusterStore(HashStore(), "here"), Passing()
    coordinator = Coordinator(store, 2, 2, clock)
    clock.meanwhile.append(coordinator.look)
    ours, theirs = Member(store, "leader:a.0", clock), Member(store, "other:b.0", clock)
    store.put(MEMBERS, ["other"])
    store.put(heartbeat_of("other"), ["b", 1])
    ours.ready()
    theirs.ready()
    coordinator.look()
    store.count("generation/0/arrived")
    first = ours.next()
    assert first is not None and first.members == ["leader:a.0", "other:b.0"]

    ours.failed()
    coordinator.look()
    clock.now += coordinators.PATIENCE_SECONDS + 0.5
    alone = coordinator.look()
    assert alone is not None and alone.members == ["leader:a.0"], "nothing was heard of the other since"
    # It is there after all, and finds that it was left out.
    clock.meanwhile.append(lambda: store.put("generation/2/arrived", 2) if store.get("generation") == 2 else None)
    together = theirs.next()
    assert together is not None and together.members == ["leader:a.0", "other:b.0"]


def test_a_machine_that_is_heard_of_is_waited_for() -> None:
    store, clock = ClusterStore(HashStore(), "here"), Passing()
    coordinator = Coordinator(store, 2, 2, clock)
    store.put(MEMBERS, ["other"])
    for name in ("leader:a.0", "other:b.0"):
        Member(store, name, clock).ready()
    assert coordinator.look() is not None
    for beat in range(40):
        store.put(heartbeat_of("other"), ["b", beat])
        clock.now += 0.25
        assert coordinator.look() is None


def test_a_machine_with_which_no_group_forms_is_left_out_and_that_is_said() -> None:
    store, clock, said = ClusterStore(HashStore(), "here"), Passing(), list[str]()
    coordinator = Coordinator(store, 2, 2, clock, said.append)
    Member(store, "leader:a.0", clock).ready()
    clock.now += coordinators.START_SECONDS + 1
    coordinator.look()
    clock.now += coordinators.START_SECONDS + 1
    alone = coordinator.look()
    assert alone is not None
    store.put("generation/0/formed", True)
    store.put(MEMBERS, ["other"])
    Member(store, "other:b.0", clock).ready()
    assert coordinator.look() is not None
    # All are there and have come to the group, but it does not form.
    store.count("generation/1/failed")
    coordinator.look()
    store.put(heartbeat_of("other"), ["b", 1])
    clock.now += coordinators.PATIENCE_SECONDS + 0.5
    without = coordinator.look()
    assert without is not None and without.members == ["leader:a.0"]
    assert said == ["machine other is left out for 5 s, as no group forms with it; see that all machines reach each other"]


def test_ranks_of_a_container_that_was_started_again_are_not_waited_for() -> None:
    store, clock = ClusterStore(HashStore(), "here"), Passing()
    coordinator = Coordinator(store, 2, 2, clock)
    store.put(MEMBERS, ["other"])
    for name in ("leader:a.0", "other:b.0"):
        Member(store, name, clock).ready()
    store.put(heartbeat_of("other"), ["b", 7])
    assert coordinator.look() is not None
    store.count("generation/0/failed")
    coordinator.look()
    # The new one's agent is heard of, and its ranks are yet to be ready.
    store.put(heartbeat_of("other"), ["c", 0])
    clock.now += coordinators.PATIENCE_SECONDS + 0.5
    alone = coordinator.look()
    assert alone is not None and alone.members == ["leader:a.0"]
