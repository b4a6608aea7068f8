"""The doctor on engines: by the variables that each sets, without one of them here."""

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.doctor import folders
from pipeline.doctor.engine import bound_gpus, place
from pipeline.hardware.machine import Machine
from tests.kit.experiment import settings
from tests.unit.cluster.test_environment import DSTACK, SLURM_BATCH, SLURM_STEP


def config(**changes: Any) -> Config:
    return Config.model_validate(settings(**changes))


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({}, ["ok     no engine: one machine"]),
        (SLURM_STEP, ["ok     Slurm: 2 machines, the leader's at gpu-003:24711, this one joins it", "note   Slurm may kill 30 s after"]),
        (SLURM_BATCH, ["ok     Slurm: one machine", "--signal=TERM@180"]),
        (
            DSTACK | {"DSTACK_NODE_RANK": "0"},
            ["this one leads", "note   dstack may kill 10 s after its stop request, and dist.grace_seconds is 60"],
        ),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ["ok     Kubernetes: one machine", "terminationGracePeriodSeconds"]),
        (SLURM_STEP | {"PET_NODE_RANK": "0"}, ["wrong  PET_NODE_RANK: 0 on machine 1 of 2"]),
    ],
)
def test_the_engine_and_its_grace_are_told(variables: dict[str, str], lines: list[str]) -> None:
    found = [str(one) for one in place(config(), variables)]
    assert len(found) == len(lines)
    assert all(part in line for part, line in zip(lines, found, strict=True)), found


def test_a_grace_that_the_engine_gives_is_no_finding() -> None:
    assert len(place(config(dist__grace_seconds=25), SLURM_BATCH)) == 1


def test_gpus_that_slurm_has_bound_to_tasks_are_seen() -> None:
    one = Machine(["H200"], 90, "a cpu", True, 13000)
    (found,) = bound_gpus(8, one, {"SLURM_GPUS_PER_TASK": "1"})
    assert str(found).startswith(
        "wrong  SLURM_GPUS_PER_TASK=1: this task sees 1 GPU(s), for 8 ranks: --ntasks-per-node=1 --gpus-per-node=8"
    )
    assert bound_gpus(1, one, {"SLURM_GPUS_PER_TASK": "1"}) == bound_gpus(8, one, {}) == []


@pytest.mark.parametrize(("call", "cannot"), [("flock", "lock a file"), ("fsync", "sync a file"), ("replace", "replace a file")])
def test_a_file_system_that_cannot_do_what_checkpoints_need_is_named(
    call: str, cannot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fine,) = folders.file_system(tmp_path / "runs")
    assert str(fine) == f"ok     {tmp_path}: files can be locked, replaced at once and synced"

    def unknown(*_: object) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(folders.fcntl if call == "flock" else os, call, unknown)
    (found,) = folders.file_system(tmp_path / "runs")
    assert str(found).startswith(f"wrong  {tmp_path}: its file system cannot {cannot} (Function not implemented), as checkpoints need: put")
    assert not list(tmp_path.iterdir())
