"""Control groups of both versions, as hosts and containers show them."""

import os
from pathlib import Path

import pytest

from pipeline.hardware import cgroup
from pipeline.hardware.cgroup import memory_limit, oom_kills, usable_cpus


@pytest.mark.parametrize(
    ("own", "file"),
    [("0::/a/b", "a/memory.max"), ("4:cpu,memory:/a/b", "memory/a/memory.limit_in_bytes"), ("4:memory:/a", "memory/memory.limit_in_bytes")],
)
def test_the_lowest_limit_from_the_own_group_upwards_counts(tmp_path: Path, own: str, file: str) -> None:
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{own}\n")
    for path, limit in ((tmp_path / file, 1 << 30), (tmp_path / "a/b/memory.max", "max")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    assert memory_limit(tmp_path, tmp_path / "own") == 1 << 30
    assert memory_limit(tmp_path / "elsewhere", tmp_path / "own") is None
    assert memory_limit(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/a/b", "a/b/memory.events"),
        # A container sees its own group as the topmost.
        ("0::/a/b", "memory.events"),
        ("4:cpu,memory:/a", "memory/a/memory.oom_control"),
        ("4:memory:/a", "memory/memory.oom_control"),
    ],
)
def test_kills_are_counted_in_the_own_group_and_else_on_the_machine(tmp_path: Path, own: str, file: str) -> None:
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{own}\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    where = (tmp_path / "groups", tmp_path / "own", tmp_path / "vmstat")
    assert oom_kills(*where) == 7
    path = tmp_path / "groups" / file
    path.parent.mkdir(parents=True)
    path.write_text("under_oom 0\noom 5\noom_kill 3\n")
    assert oom_kills(*where) == 3
    (tmp_path / "vmstat").unlink()
    path.unlink()
    assert oom_kills(*where) == 0


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/a/b", {"a/cpu.max": "{} 100000"}),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "{}", "cpu/a/cpu.cfs_period_us": "100000"}),
    ],
)
def test_as_many_cpus_count_as_a_control_group_has_time_for(tmp_path: Path, own: str, files: dict[str, str]) -> None:
    bound = len(os.sched_getaffinity(0))
    (tmp_path / "own").write_text(f"{own}\n")
    assert usable_cpus(tmp_path, tmp_path / "own") == bound
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    # One and a half are one, less than one is one, and more than there are count for nothing.
    for quota, cpus in (("150000", 1), ("20000", 1), ("100000000", bound), ("-1", bound), ("max", bound)):
        for name, content in files.items():
            (tmp_path / name).write_text(content.format(quota) + "\n")
        assert usable_cpus(tmp_path, tmp_path / "own") == cpus


def test_slurm_may_allow_fewer_cpus_than_it_binds_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = len(os.sched_getaffinity(0))
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        for said, cpus in (("1", 1), ("", bound), (str(bound + 5), bound)):
            monkeypatch.setenv(name, said)
            assert usable_cpus(tmp_path, tmp_path / "missing") == cpus


def test_an_oom_kill_is_noticed_when_it_is_first_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([2, 2, 3, 3])
    monkeypatch.setattr(cgroup, "oom_kills", lambda: next(counts))
    kills = cgroup.OomKills()
    assert kills.noticed_at(10.0) < 0
    assert [kills.noticed_at(20.0), kills.noticed_at(30.0)] == [20.0, 20.0]
