"""Every bound and type of params.yaml, and what is made of its values: shares, identity, seeds."""

import hashlib
import json
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pipeline.config import Config, ConfigError, DataError, Dist, MachineError, PeerError, Train, digest, draw_seed
from tests.kit.experiment import ROOT

NATIVE = {"reduction": "native", "lanes": None}
# Without which the smallest value would not go with the others.
BESIDE: dict[str, dict[str, Any]] = {
    "dist.lanes": {"world_size": 1},
    "dist.batch_size_per_gpu": {"world_size": 1, "lanes": 1},
    "dist.global_batch": {"world_size": 1, "lanes": 1, "batch_size_per_gpu": None},
    "train.base_batch": {"scale_learning_rate": "sqrt"},
}


def made(key: str, value: Any) -> Config:
    section, _, name = key.rpartition(".")
    return Config.model_validate({section: BESIDE.get(key, {}) | {name: value}} if section else {name: value})


def test_the_shipped_file_names_every_key() -> None:
    def keys(values: dict[str, Any]) -> set[str]:
        return {f"{name}.{key}" for name, section in values.items() if isinstance(section, dict) for key in section} | values.keys()

    assert keys(yaml.safe_load((ROOT / "params.yaml").read_text())) == keys(Config().model_dump()) - {"model.source"}


# Values at the edge of what is taken, and just beyond it.
BOUNDS = {
    "seed": ([0, 1 << 40], [-1]),
    "data.validation_share": ([0.001, 0.999], [0.0, 1.0]),
    "data.image_size": ([None, 4, 4096], [3, 4097]),
    "train.epochs": ([1], [0]),
    "train.learning_rate": ([0.001, 100.0], [0.0]),
    "train.base_batch": ([1], [0]),
    "train.ema_decay": ([None, 0.001, 0.999], [0.0, 1.0]),
    "train.clip_norm": ([None, 0.001], [0.0, -1.0]),
    "train.momentum": ([0.0, 0.999], [-0.001, 1.0]),
    "train.weight_decay": ([0.0, 2.0], [-0.001]),
    "train.warmup_epochs": ([0, 10], [-1]),
    "train.label_smoothing": ([0.0, 0.999], [-0.001, 1.0]),
    "dist.world_size": ([1], [0, -1]),
    "dist.nodes": ([1, 2], [0, -1]),
    "dist.batch_size_per_gpu": ([1], [0, -1]),
    "dist.global_batch": ([1, 256], [0, -1]),
    "dist.accumulation": ([1], [0, -1]),
    "dist.lanes": ([1], [0, -1]),
    "dist.threads_per_rank": ([1], [0]),
    "dist.timeout_seconds": ([5], [4]),
    "dist.grace_seconds": ([1], [0]),
    "checkpoint.every_steps": ([1], [0]),
    "checkpoint.keep": ([1], [0]),
    "tracking.experiment": (["a"], [""]),
    "tracking.log_every_steps": ([None, 1], [0, -1]),
}
# What may be chosen; of each, text that is close to it is refused.
CHOICES = {
    "data.augment": ["none", "crop-flip"],
    "train.schedule": ["constant", "cosine"],
    "train.scale_learning_rate": ["none", "linear", "sqrt"],
    "train.precision": ["auto", "fp32", "bf16"],
    "dist.backend": ["auto", "nccl", "gloo"],
    "dist.lanes_per_rank": [None, [1, 3], [3, 1]],
}
# Of another type; pydantic would turn most of them into what is wanted.
OTHER_TYPES = {
    "seed": ["1", 1.0, True, None],
    "data.augment": [None],
    "train.schedule": [None],
    "train.precision": [None],
    "dist.backend": [None],
    "data.name": [1, None],
    "data.root": [1],
    "data.validation_share": ["0.1", True, None],
    "data.image_size": ["28", 28.0],
    "model.name": [None],
    "train.epochs": ["10", 10.0, None],
    "train.learning_rate": ["0.1", None, float("inf"), float("nan")],
    "train.momentum": ["0.9"],
    "dist.lanes": ["4"],
    "dist.lanes_per_rank": [[1.0, 3.0], (1, 3), "1, 3"],
    "tracking.experiment": [None, 1],
    "tracking.log_every_steps": ["10", 10.0, True],
}


@pytest.mark.parametrize("key", BOUNDS)
def test_a_value_is_taken_up_to_its_bounds(key: str) -> None:
    good, bad = BOUNDS[key]
    for value in good:
        made(key, value)
    for value in bad:
        with pytest.raises(ValidationError, match=r"greater than|less than|at least 1 character"):
            made(key, value)


@pytest.mark.parametrize("key", CHOICES)
def test_what_may_be_chosen_is_taken_and_nothing_else(key: str) -> None:
    section, _, name = key.rpartition(".")
    for value in CHOICES[key]:
        assert getattr(getattr(made(key, value), section), name) == value
    for other in ("", "no such choice"):
        with pytest.raises(ValidationError):
            made(key, other)


def test_the_optimizer_and_the_reduction_are_chosen_with_what_goes_with_them() -> None:
    assert Config.model_validate({"train": {"optimizer": "sgd"}}).train.optimizer == "sgd"
    assert Config.model_validate({"train": {"optimizer": "adamw", "momentum": None}}).train.optimizer == "adamw"
    assert Dist(reduction="ordered").reduction == "ordered"
    assert Dist(reduction="native", lanes=None).reduction == "native"
    for values in ({"train": {"optimizer": ""}}, {"train": {"optimizer": "", "momentum": None}}, {"dist": {"reduction": ""}}):
        with pytest.raises(ValidationError):
            Config.model_validate(values)


@pytest.mark.parametrize("key", OTHER_TYPES)
def test_a_value_of_another_type_is_refused(key: str) -> None:
    for value in OTHER_TYPES[key]:
        with pytest.raises(ValidationError):
            made(key, value)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().seed = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_every_kind_of_error_has_its_exit_code() -> None:
    assert [error.exit_code for error in (ConfigError, DataError, MachineError, PeerError)] == [2, 3, 4, 6]


def test_a_global_batch_is_cut_into_lanes_or_into_every_ranks_micro_batches() -> None:
    ordered = Dist(world_size=3, batch_size_per_gpu=8, accumulation=2, lanes=8)
    assert (ordered.images_per_step, ordered.pieces, ordered.pieces_per_rank) == (48, 8, [3, 3, 2])
    given = Dist(world_size=3, batch_size_per_gpu=8, accumulation=2, lanes=8, lanes_per_rank=[1, 5, 2])
    assert given.pieces_per_rank == [1, 5, 2]
    native = Dist(world_size=3, batch_size_per_gpu=8, accumulation=2, reduction="native", lanes=None)
    assert (native.images_per_step, native.pieces, native.pieces_per_rank) == (48, 6, [2, 2, 2])
    assert Dist(world_size=2, accumulation=3, lanes=6).pieces == 6


def test_owners_are_not_changed_through_what_is_told_of_them() -> None:
    given = Dist(world_size=2, lanes=4, lanes_per_rank=[1, 3])
    given.pieces_per_rank.append(0)
    assert given.pieces_per_rank == [1, 3]


def test_the_identity_is_all_that_can_change_the_bits() -> None:
    config = Config.model_validate(
        {"data": {"root": "here"}, "model": {"weights": "here"}, "dist": {"world_size": 4, "nodes": 2, "accumulation": 2, "lanes": 8}}
    )
    data = {"name": "fashion-mnist", "validation_share": 0.1, "image_size": None, "augment": "none"}
    train = config.train.model_dump(exclude={"class_weights"}) | {"precision": "bf16"}
    dist = {"global_batch": 1024, "lanes": 8, "reduction": "ordered", "strategy": "ddp", "threads_per_rank": 1}
    parts = {
        "seed": 1,
        "data": data,
        "model": {"name": "lenet"},
        "train": train,
        "dist": dist,
        "device": "a cpu",
    }
    assert config.identity("a cpu", "bf16", "gloo") == parts
    assert train["epochs"] == 10
    native = Config.model_validate({"dist": {"world_size": 4, "nodes": 2, "accumulation": 2, **NATIVE}}).identity("a cpu", "bf16", "gloo")
    placed = {"lanes": None, "reduction": "native", "world_size": 4, "nodes": 2, "accumulation": 2, "backend": "gloo"}
    assert native == parts | {"dist": dist | placed}


def test_whose_statistics_batchnorm_takes_changes_the_bits_and_to_look_for_unused_parameters_does_not() -> None:
    def identity(**dist: object) -> dict[str, object]:
        return Config.model_validate({"dist": {**NATIVE, **dist}}).identity("a cpu", "bf16", "gloo")

    plain = identity()
    assert identity(sync_batchnorm=True) == plain | {"dist": plain["dist"] | {"sync_batchnorm": True}}  # pyright: ignore
    assert identity(sync_batchnorm=False, find_unused_parameters=True, elastic=True) == plain


def test_how_gradients_travel_by_hand_changes_the_bits_of_native_alone() -> None:
    def identity(**dist: object) -> dict[str, object]:
        return Config.model_validate({"dist": {"strategy": "allreduce", **dist}}).identity("a cpu", "bf16", "gloo")

    assert identity(algorithm="ring") == identity(algorithm="naive")
    assert identity(**NATIVE) == identity(algorithm="ring", **NATIVE) != identity(algorithm="naive", **NATIVE)


def test_a_seed_is_a_function_of_seed_and_key_that_never_changes() -> None:
    expected = int.from_bytes(hashlib.sha256(b"(1, 'lane', 2, 3)").digest()[:8], "big") // 2
    assert draw_seed(1, "lane", 2, 3) == expected == 7427211926158443960
    assert draw_seed(0) == int.from_bytes(hashlib.sha256(b"(0,)").digest()[:8], "big") // 2
    assert all(draw_seed(seed) < 1 << 63 for seed in range(100))


def test_a_digest_is_that_of_the_sorted_json() -> None:
    assert digest({"b": 1, "a": [None, 0.5]}) == hashlib.sha256(b'{"a": [null, 0.5], "b": 1}').hexdigest()
    assert digest({"b": 1, "a": 2}) == digest(json.loads('{"a": 2, "b": 1}'))


def test_a_global_batch_is_said_as_such_or_for_every_rank() -> None:
    said = Dist(world_size=3, batch_size_per_gpu=None, global_batch=256)
    assert (said.images_per_step, said.pieces_per_rank, said.batch_key) == (256, [2, 1, 1], "global_batch")
    both = Dist(world_size=4, batch_size_per_gpu=64, global_batch=256)
    assert (both.images_per_step, both.batch_key) == (256, "batch_size_per_gpu")
    assert Dist(world_size=2, batch_size_per_gpu=32, accumulation=2, global_batch=128).images_per_step == 128
    assert Dist(world_size=2, batch_size_per_gpu=None, accumulation=2, global_batch=128, **NATIVE).images_per_step == 128
    for values, why in (
        ({"world_size": 3, "global_batch": 256}, r"256 is not world_size x batch_size_per_gpu x accumulation \(3 x 128 x 1 = 384\)"),
        ({"batch_size_per_gpu": None}, "batch_size_per_gpu: is missing; set it, or global_batch"),
        ({"batch_size_per_gpu": None, "global_batch": 254}, r"lanes: 4 does not divide the global batch \(254\)"),
        ({"batch_size_per_gpu": None, "global_batch": 255} | NATIVE, r"255 is not divisible by world_size x accumulation \(2\)"),
        ({"batch_size_per_gpu": None, "global_batch": 256, "accumulation": 2, "lanes": 8}, "which a rank accumulates; set accumulation: 1"),
    ):
        with pytest.raises(ValidationError, match=why):
            Dist(**values)
    with pytest.raises(ValidationError, match="only scale_learning_rate: linear or sqrt takes one; set base_batch: 256"):
        Train(base_batch=64)


def test_another_way_to_say_the_same_batch_is_the_same_experiment() -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"batch_size_per_gpu": None, "global_batch": 256},
        {"world_size": 1, "batch_size_per_gpu": 256, "global_batch": 256},
    ]
    found = [Config(dist=Dist(**way)).identity("cpu", "fp32", "gloo") for way in ways]
    assert found[0] == found[1] == found[2]


def test_ranks_own_as_equal_numbers_of_lanes_as_possible() -> None:
    assert Dist(world_size=3, batch_size_per_gpu=None, global_batch=24, lanes=6).pieces_per_rank == [2, 2, 2]
    assert Dist(world_size=3, batch_size_per_gpu=None, global_batch=24, lanes=8).pieces_per_rank == [3, 3, 2]
    assert Dist(lanes_per_rank="auto").pieces_per_rank == [2, 2]
    with pytest.raises(ValidationError, match="only reduction: ordered takes unequal ranks"):
        Dist(lanes_per_rank="auto", **NATIVE)


@pytest.mark.parametrize(("kind", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_learning_rate_is_scaled_with_the_global_batch(kind: str, expected: float) -> None:
    config = Config.model_validate({"train": {"scale_learning_rate": kind, "base_batch": 256 if kind == "none" else 64}})
    assert config.peak_learning_rate == pytest.approx(expected)
