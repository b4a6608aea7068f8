"""What a job says of itself."""

import os
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.job import Job


def job(device: str = "cpu", backend: str = "gloo", **dist: Any) -> Job:
    values = {"config": Config.model_validate({"dist": {"elastic": True} | dist}), "device": device, "backend": backend}
    return Job.model_validate(values | {"precision": "fp32", "prepared": "data", "run": "run"})


def test_ranks_go_on_without_each_other_where_that_keeps_the_bits_and_is_asked_for() -> None:
    assert job().elastic
    assert job(lanes_per_rank="auto").elastic
    assert not job(elastic=False).elastic


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"strategy": "fsdp"}, "strategy: fsdp has no way to go on without a rank"),
        ({"reduction": "native", "lanes": None}, "reduction: native gives other bits on another number of ranks"),
        ({"lanes_per_rank": [1, 3]}, "lanes_per_rank: [1, 3] is for a number of ranks that stays"),
        ({"algorithm": "butterfly"}, "algorithm: butterfly has groups within the group"),
        ({"device": "cuda", "backend": "nccl"}, "it was not tried on cuda with nccl"),
    ],
)
def test_where_they_cannot_it_is_said_why(settings: dict[str, Any], why: str) -> None:
    found = job(**settings)
    assert not found.elastic
    assert found.why_not_elastic == why


def test_a_sandbox_without_pidfds_is_no_place_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert job().why_not_elastic == "it needs Linux, and to be allowed pidfd_open"
