"""Checks of GPUs, cores and memory."""

import os

import pytest
import yaml

from pipeline.config import Config
from pipeline.doctor import hardware
from pipeline.hardware.machine import Machine
from tests.kit.experiment import settings


def test_more_ranks_than_gpus_are_noted_and_the_fix_is_the_same_experiment() -> None:
    config = Config.model_validate(settings(dist__world_size=4, dist__batch_size_per_gpu=16, dist__lanes_per_rank=[1, 1, 1, 1]))
    (found,) = hardware.ranks(config, Machine(["H200"] * 3, 90, "cpu", True, 13000))
    assert found.kind == "note"
    changes = yaml.safe_load("{" + found.fix.removeprefix("set dist.") + "}")
    assert changes == {"world_size": 2, "batch_size_per_gpu": 32, "lanes_per_rank": None}
    changed = Config.model_validate(config.model_dump() | {"dist": config.dist.model_dump() | changes})
    assert changed.identity("", "", "") == config.identity("", "", "")
    assert hardware.ranks(changed, Machine(["H200"] * 3, 90, "cpu", True, 13000))[0].kind == "ok"


@pytest.mark.parametrize(
    ("backend", "kind", "words"),
    [
        (
            "auto",
            "note",
            "1 rank on 1 GPU, H200 (nccl, bf16): not 2, as ranks that share a GPU are slow; the bits are the same: set dist.wor",
        ),
        ("nccl", "wrong", "nccl wants one each; set world_size: 1, or backend: gloo"),
        ("gloo", "ok", "2 ranks on 1 GPU, H200 (gloo, bf16)"),
    ],
)
def test_two_ranks_on_one_gpu_share_it_only_if_gloo_is_asked_for(backend: str, kind: str, words: str) -> None:
    config = Config.model_validate(settings(dist__backend=backend, train__precision="bf16"))
    (found,) = hardware.ranks(config, Machine(["H200"], 90, "cpu", True, 13000))
    assert found.kind == kind
    assert words in str(found)


def test_more_threads_than_cores_are_a_note() -> None:
    cores = len(os.sched_getaffinity(0))
    (found,) = hardware.ranks(Config.model_validate(settings(dist__threads_per_rank=cores)), Machine([], 0, "cpu", True))
    assert (found.kind, found.fix) == ("note", "set dist.world_size: 1, batch_size_per_gpu: 96")


def test_little_memory_for_a_rank_is_a_note() -> None:
    limit = 1 << 30
    one, four = (Config.model_validate(settings(dist__world_size=size)).dist for size in (1, 4))
    assert hardware.memory(one, limit, "cpu") == []
    (found,) = hardware.memory(four, limit, "cpu")
    assert (found.kind, found.fix) == ("note", "MEMORY=8g docker compose up, or docker run --memory=8g")
    assert hardware.memory(four, None, "cpu") == []
    # CUDA's libraries take more.
    assert hardware.memory(one, 4 * limit, "cuda") == []
    (found,) = hardware.memory(one, 4 * limit - 1, "cuda")
    assert (found.kind, found.fix) == ("note", "MEMORY=8g docker compose up, or docker run --memory=8g")
