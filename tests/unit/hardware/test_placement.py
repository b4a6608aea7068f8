"""Placement: resolved from what is asked for and what is here."""

import pytest

from pipeline.config import Config, ConfigError, Dist, MachineError
from pipeline.hardware import machine as here
from pipeline.hardware import placement
from pipeline.hardware.machine import Machine
from pipeline.hardware.placement import a_gpu_each, as_many_ranks, fewer_ranks, resolve, said_of_fewer, slow_on_cpus
from pipeline.plan import resolved
from tests.kit.experiment import settings

NO_GPU = Machine([], 0, "a cpu", True)
OLD_CPU = Machine([], 0, "an old cpu", False)
TWO_GPUS = Machine(["H200", "H200"], 90, "a cpu", True, 13000)
ONE_GPU = Machine(["H200"], 90, "a cpu", True, 13000)
OLD_GPUS = Machine(["T4", "T4"], 75, "a cpu", True, 13000)


def config(**changes) -> Config:
    return Config.model_validate(settings(**({"train__precision": "auto"} | changes)))


@pytest.mark.parametrize(
    ("machine", "changes", "expected"),
    [
        (NO_GPU, {}, ("cpu", "gloo", "bf16")),
        (OLD_CPU, {}, ("cpu", "gloo", "fp32")),
        (OLD_CPU, {"train__precision": "bf16"}, ("cpu", "gloo", "bf16")),
        (TWO_GPUS, {}, ("cuda", "nccl", "bf16")),
        (TWO_GPUS, {"dist__backend": "gloo"}, ("cuda", "gloo", "bf16")),
        (ONE_GPU, {}, ("cuda", "gloo", "bf16")),
        (OLD_GPUS, {}, ("cuda", "nccl", "fp32")),
    ],
)
def test_auto_is_what_the_machine_can_do(machine: Machine, changes, expected: tuple[str, str, str]) -> None:
    placement = resolve(config(**changes), machine)
    assert (placement.device, placement.backend, placement.precision) == expected


@pytest.mark.parametrize(
    ("machine", "part"),
    [
        (NO_GPU, r"needs GPUs.*set backend: gloo"),
        (ONE_GPU, r"2 ranks, 1 GPUs.*set world_size: 1"),
        (Machine(["A100", "H200"], 80, "a cpu", True, 13000), "several kinds"),
        (Machine(["V100", "V100"], 70, "a cpu", True, 13000), r"V100: CUDA 13 has no kernels.*CUDA_VISIBLE_DEVICES="),
        (Machine(["H200", "H200"], 90, "a cpu", True, 12040), r"can do CUDA 12\.4 and torch needs 13\.0"),
    ],
)
@pytest.mark.fault(24, "nccl without a GPU, more ranks than GPUs, GPUs of two kinds or too old, a driver too old")
def test_what_cannot_be_names_the_setting_that_works(machine: Machine, part: str) -> None:
    with pytest.raises(MachineError, match=part):
        resolve(config(dist__backend="nccl"), machine)


def test_more_ranks_than_gpus_become_one_for_each_and_stay_the_same_experiment() -> None:
    asked = config(dist__world_size=4, dist__batch_size_per_gpu=24, dist__lanes_per_rank=[1, 1, 1, 1])
    for machine, size in ((ONE_GPU, 1), (TWO_GPUS, 2), (Machine(["H200"] * 3, 90, "a cpu", True, 13000), 3)):
        placed = a_gpu_each(asked, machine)
        assert (placed.dist.world_size, placed.dist.images_per_step, placed.dist.pieces) == (size, 96, 4)
        assert Config.model_validate(placed.model_dump()).identity("", "", "") == asked.identity("", "", "")
        assert resolve(placed, machine).backend == "nccl"
        assert said_of_fewer(asked.dist, placed.dist).startswith(f"world size {size} and not 4, as ranks that share a GPU are slow")
    assert said_of_fewer(asked.dist, asked.dist) == ""


def test_one_gpu_and_two_ranks_are_planned_as_one_rank_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "detect", lambda: ONE_GPU)
    planned, placed = resolved(config())
    assert (planned.dist.world_size, planned.dist.nodes, placed.device, placed.backend) == (1, 1, "cuda", "nccl")


@pytest.mark.parametrize(
    ("machine", "changes"),
    [
        (NO_GPU, {}),
        (TWO_GPUS, {}),
        (ONE_GPU, {"dist__backend": "gloo"}),
        (ONE_GPU, {"dist__nodes": 2}),
        (ONE_GPU, {"dist__reduction": "native", "dist__lanes": None}),
    ],
)
def test_what_was_asked_for_stays_where_it_can_be_had_was_chosen_or_is_another_experiment(machine: Machine, changes) -> None:
    asked = config(**changes)
    assert a_gpu_each(asked, machine) is asked


def test_fewer_ranks_divide_a_global_batch_that_is_not_cut_into_lanes() -> None:
    native = Dist(world_size=4, batch_size_per_gpu=None, global_batch=256, lanes=None, reduction="native")
    assert fewer_ranks(native, 3) == {"world_size": 2}
    assert fewer_ranks(Dist(world_size=4, batch_size_per_gpu=None, global_batch=256), 3) == {"world_size": 3}


@pytest.mark.parametrize(
    ("world_size", "replicas", "most", "expected"),
    [(4, 2, 2, (2, 1)), (8, 2, 4, (4, 1)), (4, 4, 3, (3, 3)), (6, 3, 5, (4, 2)), (8, 4, 6, (6, 3)), (8, 2, 3, (3, 1))],
)
def test_copies_of_a_model_keep_their_number_of_ranks_where_there_is_room(
    world_size: int, replicas: int, most: int, expected: tuple[int, int]
) -> None:
    dist = Dist(strategy="pipeline", world_size=world_size, replicas=replicas, batch_size_per_gpu=None, global_batch=256, lanes=8)
    assert fewer_ranks(dist, most) == {"world_size": expected[0], "replicas": expected[1]}
    each = Dist(strategy="pipeline", world_size=4, replicas=2, batch_size_per_gpu=64, lanes=4)
    assert fewer_ranks(each, 3) == {"world_size": 2, "replicas": 1, "batch_size_per_gpu": 128}


AUTO = {"dist__world_size": "auto", "dist__batch_size_per_gpu": None, "dist__global_batch": 96}


@pytest.mark.parametrize(
    ("machine", "nodes", "asked", "size"),
    [
        (TWO_GPUS, 1, "", 2),
        (TWO_GPUS, 2, "", 4),
        # As torchrun's word for it, and as an engine's number.
        (TWO_GPUS, 1, "auto", 2),
        (TWO_GPUS, 2, "1", 2),
        (ONE_GPU, 3, "", 3),
        (NO_GPU, 1, "", 3),
        # No more ranks than lanes, as many on every machine.
        (NO_GPU, 1, "8", 4),
        (NO_GPU, 3, "8", 3),
    ],
)
def test_the_world_size_comes_from_who_is_there_and_the_experiment_stays(
    machine: Machine, nodes: int, asked: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "usable_cpus", lambda: 3)
    auto = config(**AUTO, dist__nodes=nodes)
    sized = as_many_ranks(auto, machine, asked)
    assert (sized.dist.world_size, sized.dist.nodes, sized.dist.auto) == (size, nodes, False)
    # What ranks, MLflow and other machines get of it is an experiment like any other.
    again = Config.model_validate(sized.model_dump())
    assert again == sized
    assert again.identity("", "", "") == auto.identity("", "", "") == config().identity("", "", "")
    assert as_many_ranks(sized, TWO_GPUS, "4") is sized


def test_sizes_that_a_strategy_cannot_take_are_left_out() -> None:
    fsdp = as_many_ranks(config(**AUTO, dist__strategy="fsdp", dist__lanes=4), Machine(["H200"] * 3, 90, "a cpu", True, 13000))
    assert fsdp.dist.world_size == 2
    assert as_many_ranks(config(**AUTO, dist__strategy="dataparallel"), TWO_GPUS).dist.world_size == 1
    with pytest.raises(ConfigError, match=r"dist\.lanes: 4 are fewer than 5 machines"):
        as_many_ranks(config(**AUTO).model_copy(update={"dist": config(**AUTO).dist.model_copy(update={"nodes": 5})}), NO_GPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"dist__batch_size_per_gpu": 48, "dist__global_batch": None},
        {"dist__reduction": "native", "dist__lanes": None},
        {"dist__strategy": "fsdp", "dist__replicas": 2},
        {"dist__lanes_per_rank": [4]},
    ],
)
def test_a_size_of_its_own_needs_a_batch_that_it_does_not_change(changes) -> None:
    with pytest.raises(ValueError, match="world_size: auto needs global_batch, ordered, replicas: 1, and null as batch_size_per_gpu"):
        config(**AUTO | changes)


def test_what_makes_cpus_slow_is_said_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: {0, 1})

    def found(machine: Machine, **changes: object) -> list[tuple[str, str]]:
        asked = config(**changes)
        return slow_on_cpus(asked.dist, resolve(asked, machine), machine)

    assert found(NO_GPU) == found(OLD_CPU) == found(NO_GPU, train__precision="bf16") == []
    ((text, cure),) = found(OLD_CPU, train__precision="bf16")
    assert (text, cure) == (
        "bf16 is not known to be faster than fp32 on this CPU",
        "set train.precision: auto",
    )
    ((text, cure),) = found(NO_GPU, dist__world_size=4, dist__batch_size_per_gpu=24)
    assert text == "no GPU; 4 ranks with 4 threads on 2 cores (gloo, bf16), which is slow"
    assert cure == "set dist.world_size: 2, batch_size_per_gpu: 48"
    assert len(found(OLD_CPU, train__precision="bf16", dist__threads_per_rank=64)) == 2
