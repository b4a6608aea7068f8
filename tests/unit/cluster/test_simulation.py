"""The protocol of leader and workers, by their own code but in simulated time: every fault at every point, and many at random."""

import os
from collections.abc import Iterator
from itertools import combinations
from random import Random
from typing import Any

import pytest

from pipeline.cluster.membership import MultiNode
from pipeline.config import MachineError, PeerError
from pipeline.runs.status import STOPPED
from pipeline.timeouts import ending_seconds
from tests.kit.machine_faults import CLOCKS, FAULTS, OF_WORKERS
from tests.kit.machines import Machines
from tests.kit.simulation import World

# Workers that a job needs, and workers that come.
SIZES = [(1, 1), (1, 2), (2, 3)]
LEADER = -1
# Until all have left after a member was told to stop.
STOP_SECONDS = 60
# LOCKSTEP_SCHEDULES=100000 explores so many at random, and every point of every size, for half an hour.
CAMPAIGN = int(os.environ.get("LOCKSTEP_SCHEDULES", "0"))


def problems(machines: Machines) -> list[str]:
    """Return what does not hold after a schedule."""
    found, verdict = list(machines.world.violations), machines.verdict
    faults = {kind for _, kind, _ in machines.faults}
    for one in machines.workers:
        if one.result is None:
            continue
        signalled_at = machines.signalled.get(one.name)
        unreachable = verdict is None or "store lost" in faults or one.name in machines.touched() - machines.touched("SIGTERM")
        allowed = {verdict} | ({STOPPED} if signalled_at is not None else set()) | ({PeerError.exit_code} if unreachable else set())
        if one.result not in allowed:
            found.append(f"{one.name} ended with {one.result}, and the leader with {verdict}")
        if one.ended_at > machines.leader.ended_at + 5 and one.name not in machines.touched() and "pause of all" not in faults:
            found.append(f"{one.name} ended {one.ended_at - machines.leader.ended_at:.0f} s after the leader")
        if signalled_at is not None and one.ended_at > signalled_at + ending_seconds(60) + 30:
            found.append(f"{one.name} ended {one.ended_at - signalled_at:.0f} s after its signal")
    if MachineError.exit_code in machines.stage_codes and not faults & set(CLOCKS):
        found.append("a job was refused without a reason")
    stopped = [name for name in machines.signalled if name == "stage" or name in machines.ever_members]
    if (
        machines.leader.ended_at > machines.stopping_since + STOP_SECONDS
        and not machines.goes_on
        and not faults & {"long pause", "pause of all"}
    ):
        found.append(f"the leader ended {machines.leader.ended_at - machines.stopping_since:.0f} s after a member was told to stop")
    disturbed = "store lost" in faults or machines.touched(*CLOCKS) or stopped or "stage" in machines.touched("crash")
    staying = {one.name for one in machines.workers} - machines.touched("crash", "SIGTERM")
    if not disturbed and len(staying) >= machines.needed and machines.leader.result != 0:
        found.append(f"the leader ended with {machines.leader.result} although enough workers were there")
    return found


def explore(size: tuple[int, int], plan: dict[int, Any] | None = None, random: Random | None = None, **options: Any) -> Machines:
    machines = Machines(World(plan, random), *size, **options)
    machines.world.run()
    return machines


def faults_of(size: tuple[int, int]) -> list[tuple[str, int]]:
    """Return every fault with every machine that may suffer it."""
    return [(kind, target) for kind in FAULTS for target in range(0 if kind in OF_WORKERS else LEADER, size[1])]


def random_schedule(seed: int) -> Machines:
    """One to three faults at random points, in a random order of processes."""
    random = Random(seed)
    size = random.choice(SIZES)
    plan = {random.randint(1, 900): random.choice(faults_of(size)) for _ in range(random.randint(1, 3))}
    return explore(size, plan, random, goes_on=random.random() < 0.5)


def judge(schedules: Iterator[tuple[Any, Machines]], record_property: Any) -> None:
    """Fail with the first schedules that go wrong, and say how many there were."""
    count, wrong = 0, list[str]()
    for plan, machines in schedules:
        count += 1
        wrong += [f"{plan}: {machines.faults}: {problem}" for problem in problems(machines)]
        if len(wrong) > 4:
            break
    print(f"{count} schedules")
    record_property("schedules", count)
    assert not wrong, "\n".join(wrong)


def test_a_job_whose_processes_go_in_any_order_at_the_start_is_done(record_property: Any) -> None:
    """At most two of the first calls to the store are overtaken by what the others do meanwhile: all such orders."""
    depth = 60 if CAMPAIGN else 30
    plans = [dict.fromkeys(points, "preempt") for count in (0, 1, 2) for points in combinations(range(1, depth + 1), count)]
    judge(((plan, explore((1, 1), plan, num_jobs=1)) for plan in plans), record_property)


@pytest.mark.parametrize("size", SIZES, ids=["no spare", "a spare", "two of three"])
def test_every_fault_at_every_point_of_a_job(size: tuple[int, int], record_property: Any) -> None:
    """At every point of the smallest job, at every 31st of the others; in a campaign at every one of all."""
    stride = 1 if size == (1, 1) or CAMPAIGN else 31
    num_jobs = 1 if size == (1, 1) else 2
    points = range(1, explore(size, num_jobs=num_jobs).world.points, stride)
    plans = [{point: fault} for fault in faults_of(size) for point in points]
    judge(((plan, explore(size, plan, num_jobs=num_jobs)) for plan in plans), record_property)


def test_several_faults_at_random(record_property: Any) -> None:
    judge(((f"seed {seed}", random_schedule(seed)) for seed in range(CAMPAIGN or 300)), record_property)


def test_a_protocol_that_admits_one_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = MultiNode.wait_for_workers

    def wait_for_one_more(self: MultiNode, where: str) -> None:
        self._wanted, self._most = self._wanted + 1, self._most + 1
        wait(self, where)

    monkeypatch.setattr(MultiNode, "wait_for_workers", wait_for_one_more)
    assert "2 workers admitted, 1 wanted" in problems(explore((1, 2)))
