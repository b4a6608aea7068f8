"""What suits which strategy."""

from typing import Any

import pytest

from pipeline import parallel
from pipeline.config import ConfigError, Dist

THREE: dict[str, Any] = {"world_size": 3, "batch_size_per_gpu": None, "global_batch": 24}
NATIVE = {"reduction": "native", "lanes": None}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "dpp"}, "dist.strategy: 'dpp' is unknown; did you mean ddp?"),
        ({"algorithm": "naive"}, "dist.algorithm: naive: strategy: ddp takes flat or hierarchical or butterfly; set algorithm: null"),
        (
            {"strategy": "graphs", "algorithm": "flat"},
            "dist.algorithm: flat: strategy: graphs has one algorithm alone; set algorithm: null",
        ),
        (
            {"algorithm": "flat", "reduction": "native", "lanes": None},
            "dist.algorithm: flat: under reduction: native the backend has its own; set algorithm: null",
        ),
        (
            {"strategy": "pipeline", "algorithm": "ring"},
            "dist.algorithm: ring: strategy: pipeline takes 1f1b or gpipe; set algorithm: null",
        ),
        (
            {"strategy": "allreduce", "replicas": 2},
            "dist.replicas: strategy: allreduce has one copy of the model, or one on each rank",
        ),
        ({"strategy": "pipeline", "replicas": 2, **THREE}, "dist.replicas: 2 does not divide world_size (3)"),
        ({"strategy": "fsdp", **THREE}, "dist.lanes: 4 on 3 ranks: fsdp computes in step, so every rank owns as many; set another number"),
        ({"strategy": "fsdp", "lanes_per_rank": [3, 1]}, "dist.lanes_per_rank: [3, 1]: fsdp computes in step"),
        ({"strategy": "fsdp", "lanes_per_rank": "auto"}, "dist.lanes_per_rank: fsdp computes in step, so ranks own equal numbers of lanes"),
        ({"strategy": "pipeline", "lanes_per_rank": [2, 2]}, "dist.lanes_per_rank: all lanes go through every rank of a pipeline"),
        ({"strategy": "pipeline", "lanes_per_rank": "auto"}, "dist.lanes_per_rank: all lanes go through every rank of a pipeline"),
        ({"strategy": "tensor"}, "dist.reduction: tensor adds up in an order that the number of ranks changes; set reduction: native"),
        ({"strategy": "tensor", "replicas": 2, **NATIVE}, "dist.replicas: strategy: tensor has one copy of the model"),
        ({"strategy": "dataparallel"}, "dist.world_size: dataparallel is one process with all GPUs; set world_size: 1"),
        ({"strategy": "dataparallel", "world_size": 1, "lanes_per_rank": "auto"}, "dist.strategy: dataparallel knows neither"),
        ({"strategy": "dataparallel", "world_size": 1, **NATIVE}, "dist.strategy: dataparallel knows neither"),
        ({"sync_batchnorm": True}, "dist.sync_batchnorm: under reduction: ordered a lane has statistics of its own; set reduction: native"),
        *(
            ({"sync_batchnorm": True, "strategy": name, **NATIVE}, f"dist.sync_batchnorm: {name} does not bring")
            for name in ("graphs", "pipeline", "tensor")
        ),
        ({"sync_batchnorm": True, "find_unused_parameters": True, **NATIVE}, "dist.find_unused_parameters: ddp with sync_batchnorm needs"),
        ({"find_unused_parameters": True, "strategy": "fsdp"}, "dist.find_unused_parameters: fsdp waits for the gradients"),
    ],
)
def test_what_does_not_suit_a_strategy_is_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parallel.check(Dist(**settings))
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    "settings",
    [
        *({"strategy": name} for name in parallel.CATALOGUE if name not in ("dataparallel", "tensor")),
        {"strategy": "tensor", **NATIVE},
        {"strategy": "dataparallel", "world_size": 1, "lanes_per_rank": [1, 3]},
        {"strategy": "fsdp", "lanes": 6, **THREE},
        {"strategy": "fsdp", "lanes_per_rank": [2, 2]},
        {"strategy": "pipeline", "replicas": 2, "world_size": 4, "algorithm": "gpipe"},
        {"strategy": "pipeline", **THREE},
        {"strategy": "allreduce", "algorithm": "naive", "lanes_per_rank": [3, 1]},
        {"lanes_per_rank": "auto"},
        *({"sync_batchnorm": True, "strategy": name, **NATIVE} for name in ("ddp", "allreduce", "fsdp")),
        {"sync_batchnorm": True, "find_unused_parameters": True, "strategy": "allreduce", **NATIVE},
        *({"find_unused_parameters": True, "strategy": name} for name in ("ddp", "allreduce", "graphs", "pipeline")),
    ],
)
def test_what_suits_it_is_taken(settings: dict[str, Any]) -> None:
    parallel.check(Dist(**settings))
