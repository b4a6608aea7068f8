"""Every bound, every cross-check and every message of params.yaml, and the identity that it makes."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pipeline.config import Config, ConfigError, DataError, Dist, MachineError, PeerError, digest, draw_seed, load, unknown
from tests.kit.experiment import ROOT

NATIVE = {"reduction": "native", "lanes": None}
# Without which the smallest value would not go with the others.
BESIDE = {"dist.lanes": {"world_size": 1}, "dist.batch_size_per_gpu": {"world_size": 1, "lanes": 1}}


def made(key: str, value: Any) -> Config:
    section, _, name = key.rpartition(".")
    return Config.model_validate({section: BESIDE.get(key, {}) | {name: value}} if section else {name: value})


def test_the_shipped_file_names_every_key() -> None:
    def keys(values: dict[str, Any]) -> set[str]:
        return {f"{name}.{key}" for name, section in values.items() if isinstance(section, dict) for key in section} | values.keys()

    assert keys(yaml.safe_load((ROOT / "params.yaml").read_text())) == keys(Config().model_dump())


# Values at the edge of what is taken, and just beyond it.
BOUNDS = {
    "seed": ([0, 1 << 40], [-1]),
    "data.validation_share": ([0.001, 0.999], [0.0, 1.0]),
    "data.image_size": ([None, 4, 4096], [3, 4097]),
    "train.epochs": ([1], [0]),
    "train.learning_rate": ([0.001, 100.0], [0.0]),
    "train.momentum": ([0.0, 0.999], [-0.001, 1.0]),
    "train.weight_decay": ([0.0, 2.0], [-0.001]),
    "train.warmup_epochs": ([0, 10], [-1]),
    "train.label_smoothing": ([0.0, 0.999], [-0.001, 1.0]),
    "dist.world_size": ([1], [0, -1]),
    "dist.nodes": ([1, 2], [0, -1]),
    "dist.batch_size_per_gpu": ([1], [0, -1]),
    "dist.accumulation": ([1], [0, -1]),
    "dist.lanes": ([1], [0, -1]),
    "dist.threads_per_rank": ([1], [0]),
    "dist.timeout_seconds": ([5], [4]),
    "dist.grace_seconds": ([1], [0]),
    "checkpoint.every_steps": ([1], [0]),
    "checkpoint.keep": ([1], [0]),
    "tracking.experiment": (["a"], [""]),
}
# What may be chosen; of each, text that is close to it is refused.
CHOICES = {
    "data.augment": ["none", "crop-flip"],
    "train.schedule": ["constant", "cosine"],
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
}


@pytest.mark.parametrize("key", BOUNDS)
def test_a_value_is_taken_up_to_its_bounds(key: str) -> None:
    good, bad = BOUNDS[key]
    for value in good:
        made(key, value)
    for value in bad:
        with pytest.raises(ValidationError, match="greater than|less than|at least 1 character"):
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


def written(tmp_path: Path, values: Any) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


# What is written, and the whole line that says what is wrong with it, without the file's name.
SAID = [
    ({"dist": {"world_size": 3, "nodes": 2}}, "dist.nodes: 2 does not divide world_size (3)"),
    ({"dist": {"reduction": "native"}}, "dist.lanes: native reduction has none; set lanes: null, or reduction: ordered"),
    ({"dist": NATIVE | {"lanes_per_rank": [1, 1]}}, "dist.lanes_per_rank: only reduction: ordered takes unequal ranks; set lanes_per_rank: null"),
    ({"dist": {"lanes": None, "accumulation": 3}}, "dist.lanes: reduction: ordered needs at least 6, or set reduction: native"),
    ({"dist": {"lanes": 5, "accumulation": 3}}, "dist.lanes: 5 is fewer than world_size x accumulation; set lanes to at least 6"),
    ({"dist": {"lanes": 3}}, "dist.lanes: 3 does not divide the global batch (256); set lanes or batch_size_per_gpu"),
    ({"dist": {"lanes_per_rank": [1, 2]}}, "dist.lanes_per_rank: [1, 2] must be 2 numbers of at least 1 that add up to lanes (4)"),
    ({"dist": {"lanes_per_rank": [4]}}, "dist.lanes_per_rank: [4] must be 2 numbers of at least 1 that add up to lanes (4)"),
    ({"dist": {"lanes_per_rank": [4, 0]}}, "dist.lanes_per_rank: [4, 0] must be 2 numbers of at least 1 that add up to lanes (4)"),
    ({"train": {"optimizer": "adamw"}}, "train.momentum: adamw has none; set momentum: null"),
    ({"train": {"momentum": None}}, "train.momentum: sgd needs one; 0.0 is plain gradient descent"),
    ({"train": {"epochs": 3, "warmup_epochs": 4}}, "train.warmup_epochs: 4 is more than epochs (3)"),
    ({"train": {"learing_rate": 0.1}}, "train.learing_rate: unknown key; did you mean learning_rate?"),
    ({"tarin": {}}, "tarin: unknown key; did you mean train?"),
    ({"model": {"kind": 1}}, "model.kind: unknown key; known: name"),
    ({"train": {"learning_rate": "1e-3"}}, "train.learning_rate: '1e-3' is text, not a number; write 0.001"),
    ({"train": {"learning_rate": "1e1"}}, "train.learning_rate: '1e1' is text, not a number; write 10"),
    ({"train": {"epochs": "1e1"}}, "train.epochs: '1e1' is text, not a number; write 10"),
    ({"train": {"epochs": "1.5"}}, "train.epochs: '1.5' is text, not a number; write 1"),
    ({"train": {"epochs": "ten"}}, "train.epochs: 'ten' is text, not a number"),
    ({"train": {"learning_rate": "inf"}}, "train.learning_rate: 'inf' is text, not a number"),
    ({"train": {"epochs": 0}}, "train.epochs: 0 is wrong; it must be greater than or equal to 1"),
    ({"train": {"epochs": [1]}}, "train.epochs: [1] is wrong; it must be a valid integer"),
    ({"data": "none"}, "data: 'none' is wrong; it must be a section like Data"),
    ({"model": {"name": 1}}, "model.name: 1 is wrong; it must be a valid string"),
    ({"tracking": {"experiment": ""}}, "tracking.experiment: '' is wrong; it string should have at least 1 character"),
    (
        {"seed": -1, "train": {"epochs": 0}},
        "seed: -1 is wrong; it must be greater than or equal to 0; train.epochs: 0 is wrong; it must be greater than or equal to 1",
    ),
    ("seed: 1\nseed: 2", "seed: stands twice; remove one of them"),
    ("train:\n  epochs: 1\n  epochs: 2\nseed: 1\nmodel:\n  name: a\n  name: b", "model.name: stands twice; remove one of them"),
    ("- 1", "expected sections such as data: and train:, found list"),
    ("", "expected sections such as data: and train:, found NoneType"),
    ("a: [", "not YAML: while parsing a flow node expected the node content, but found '<stream end>' in line 1, column 5"),
    ("a: b: c", "not YAML: mapping values are not allowed here in line 1, column 5"),
]


@pytest.mark.parametrize(("values", "said"), SAID, ids=[said[:40] for _, said in SAID])
def test_what_is_wrong_is_said_in_full(values: Any, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, values)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value) == f"{path}: {said}"


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    with pytest.raises(ConfigError, match=rf"^{path}: no such file; run from the project's folder, or name the file with --params$"):
        load(path)
    path.mkdir()
    with pytest.raises(ConfigError, match=rf"^{path}: cannot be read: Is a directory$"):
        load(path)
    path.rmdir()
    path.write_bytes(b"seed: 1 # \xff")
    with pytest.raises(ConfigError, match=rf"^{path}: not YAML: 'utf-8' codec can't decode byte 0xff"):
        load(path)


def test_a_file_is_read_as_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes("tracking:\n  experiment: größer".encode())
    assert load(path).tracking.experiment == "größer"
    assert load(written(tmp_path, {"seed": 5, "train": {"epochs": 3}})) == Config.model_validate({"seed": 5, "train": {"epochs": 3}})


def test_an_unknown_name_is_answered_with_the_nearest_or_with_all() -> None:
    catalogue = ["fashion-mnist", "cifar10", "stl10"]
    assert str(unknown("data.name", "fashion-minst", catalogue)) == "data.name: 'fashion-minst' is unknown; did you mean fashion-mnist?"
    assert str(unknown("data.name", "stl1", catalogue)) == "data.name: 'stl1' is unknown; did you mean stl10?"
    assert str(unknown("data.name", "imagenet", catalogue)) == "data.name: 'imagenet' is unknown; known: fashion-mnist, cifar10, stl10"


def test_every_kind_of_error_has_its_exit_code() -> None:
    assert [error.exit_code for error in (ConfigError, DataError, MachineError, PeerError)] == [2, 3, 4, 6]


def test_a_global_batch_is_cut_into_lanes_or_into_every_ranks_micro_batches() -> None:
    ordered = Dist(world_size=3, batch_size_per_gpu=8, accumulation=2, lanes=8)
    assert (ordered.global_batch, ordered.pieces, ordered.pieces_per_rank) == (48, 8, [3, 3, 2])
    given = Dist(world_size=3, batch_size_per_gpu=8, accumulation=2, lanes=8, lanes_per_rank=[1, 5, 2])
    assert given.pieces_per_rank == [1, 5, 2]
    native = Dist(world_size=3, batch_size_per_gpu=8, accumulation=2, reduction="native", lanes=None)
    assert (native.global_batch, native.pieces, native.pieces_per_rank) == (48, 6, [2, 2, 2])
    assert Dist(world_size=2, accumulation=3, lanes=6).pieces == 6


def test_owners_are_not_changed_through_what_is_told_of_them() -> None:
    given = Dist(world_size=2, lanes=4, lanes_per_rank=[1, 3])
    given.pieces_per_rank.append(0)
    assert given.pieces_per_rank == [1, 3]


def test_the_identity_is_all_that_can_change_the_bits() -> None:
    config = Config.model_validate({"data": {"root": "here"}, "dist": {"world_size": 4, "nodes": 2, "accumulation": 2, "lanes": 8}})
    data = {"name": "fashion-mnist", "validation_share": 0.1, "image_size": None, "augment": "none"}
    train = config.train.model_dump() | {"precision": "bf16"}
    dist = {"global_batch": 1024, "lanes": 8, "reduction": "ordered", "strategy": "ddp", "threads_per_rank": 1}
    parts = {"seed": 1, "data": data, "model": {"name": "lenet"}, "train": train, "dist": dist, "device": "a cpu"}
    assert config.identity("a cpu", "bf16", "gloo") == parts
    assert train["epochs"] == 10
    native = Config.model_validate({"dist": {"world_size": 4, "nodes": 2, "accumulation": 2, **NATIVE}}).identity("a cpu", "bf16", "gloo")
    placed = {"lanes": None, "reduction": "native", "world_size": 4, "nodes": 2, "accumulation": 2, "backend": "gloo"}
    assert native == parts | {"dist": dist | placed}


def test_a_seed_is_a_function_of_seed_and_key_that_never_changes() -> None:
    expected = int.from_bytes(hashlib.sha256(b"(1, 'lane', 2, 3)").digest()[:8], "big") // 2
    assert draw_seed(1, "lane", 2, 3) == expected == 7427211926158443960
    assert draw_seed(0) == int.from_bytes(hashlib.sha256(b"(0,)").digest()[:8], "big") // 2
    assert all(draw_seed(seed) < 1 << 63 for seed in range(100))


def test_a_digest_is_that_of_the_sorted_json() -> None:
    assert digest({"b": 1, "a": [None, 0.5]}) == hashlib.sha256(b'{"a": [null, 0.5], "b": 1}').hexdigest()
    assert digest({"b": 1, "a": 2}) == digest(json.loads('{"a": 2, "b": 1}'))
