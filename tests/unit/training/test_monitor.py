"""System metrics: what machines are busy with, from all of them, by the names that MLflow shows."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.ranks import Ranks
from pipeline.training import monitor
from pipeline.training.monitor import Monitor, jiffies, memory

NAMES = {"cpu_utilization_percentage", "system_memory_usage_megabytes", "system_memory_usage_percentage"}


def test_a_busy_core_is_seen_and_memory_is_that_of_the_machine(alone: Ranks) -> None:
    watch = Monitor(alone, 1)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        pass
    figures = watch(0.25)
    assert figures.keys() == {"system/rank_0_step_milliseconds"} | {f"system/{name}" for name in NAMES}
    assert figures["system/rank_0_step_milliseconds"] == 250
    # One core at least was busy.
    assert figures["system/cpu_utilization_percentage"] > 50 / torch.get_num_interop_threads()
    assert figures["system/cpu_utilization_percentage"] <= 100
    assert 0 < figures["system/system_memory_usage_percentage"] < 100
    used, share = memory()
    assert figures["system/system_memory_usage_megabytes"] == pytest.approx(used, rel=0.2)
    assert 0 < share < 100


def test_the_cores_are_counted_as_linux_tells_them(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(monitor, "STAT", stat)
    stat.write_text("cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert jiffies() == (800, 1000)
    watch = Monitor(alone, 1)
    stat.write_text("cpu  160 0 115 720 105 0 0 0 50 0\n")
    assert watch(0)["system/cpu_utilization_percentage"] == 75
    # Nothing has passed.
    assert watch(0)["system/cpu_utilization_percentage"] == 0


def test_where_there_is_no_proc_nothing_is_known_and_nothing_fails(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STAT", "MEMINFO"):
        monkeypatch.setattr(monitor, name, tmp_path / "none")
    assert set(Monitor(alone, 1)(0).values()) == {0.0}


def figures_of(group: Ranks, nodes: int) -> dict[str, float]:
    return Monitor(group, nodes)(0.5 + group.rank)


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_rank_of_each_machine_speaks_for_it(nodes: int, run_ranks: Callable[..., list[Any]]) -> None:
    (first,), *others = run_ranks(4, (figures_of, (nodes,)))
    prefixes = ["system"] if nodes == 1 else ["system/node_0", "system/node_1"]
    steps = {f"system/rank_{rank}_step_milliseconds": 500.0 + 1000 * rank for rank in range(4)}
    assert first.keys() == steps.keys() | {f"{prefix}/{name}" for prefix in prefixes for name in NAMES}
    assert {name: first[name] for name in steps} == steps
    assert others == [[first]] * 3
