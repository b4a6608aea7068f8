"""Every cross-check of params.yaml and every line that says what is wrong with it, word for word."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import Config, ConfigError, unknown
from pipeline.config.params import load


def written(tmp_path: Path, values: Any) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


AUTO_NEEDS = "dist.world_size: auto needs global_batch, ordered, replicas: 1, and null as batch_size_per_gpu and lanes_per_rank"
# What is written, and the whole line that says what is wrong with it, without the file's name.
SAID = [
    ({"dist": {"world_size": 3, "nodes": 2}}, "dist.nodes: 2 does not divide world_size (3)"),
    ({"dist": {"world_size": "auto"}}, AUTO_NEEDS),
    ({"dist": {"init_method": "tcp://leader"}}, "dist.init_method: 'tcp://leader': write env://, tcp://HOST:PORT or file:///PATH"),
    ({"dist": {"init_method": "tcp://leader:0"}}, "dist.init_method: 'tcp://leader:0': write env://, tcp://HOST:PORT or file:///PATH"),
    ({"dist": {"init_method": "tcp://a:65536"}}, "dist.init_method: 'tcp://a:65536': write env://, tcp://HOST:PORT or file:///PATH"),
    ({"dist": {"init_method": "file://meeting"}}, "dist.init_method: 'file://meeting': write env://, tcp://HOST:PORT or file:///PATH"),
    ({"dist": {"reduction": "native"}}, "dist.lanes: native reduction has none; set lanes: null, or reduction: ordered"),
    (
        {"dist": {"reduction": "native", "lanes": None, "lanes_per_rank": [1, 1]}},
        "dist.lanes_per_rank: only reduction: ordered takes unequal ranks; set lanes_per_rank: null",
    ),
    ({"dist": {"lanes": None, "accumulation": 3}}, "dist.lanes: reduction: ordered needs at least 6, or set reduction: native"),
    (
        {"dist": {"lanes": 5, "accumulation": 3}},
        "dist.lanes: 5 is fewer than world_size x accumulation; at least 6 would do, with other bits",
    ),
    ({"dist": {"lanes": 3}}, "dist.lanes: 3 does not divide the global batch (256); set lanes or batch_size_per_gpu"),
    ({"dist": {"lanes_per_rank": [1, 2]}}, "dist.lanes_per_rank: [1, 2] must be 2 numbers of at least 1 that add up to lanes (4)"),
    ({"dist": {"lanes_per_rank": [4]}}, "dist.lanes_per_rank: [4] must be 2 numbers of at least 1 that add up to lanes (4)"),
    ({"dist": {"lanes_per_rank": [4, 0]}}, "dist.lanes_per_rank: [4, 0] must be 2 numbers of at least 1 that add up to lanes (4)"),
    ({"train": {"optimizer": "adamw"}}, "train.momentum: adamw has none; set momentum: null"),
    ({"train": {"momentum": None}}, "train.momentum: sgd needs one; 0.0 is plain gradient descent"),
    ({"train": {"epochs": 3, "warmup_epochs": 4}}, "train.warmup_epochs: 4 is more than epochs (3)"),
    ({"train": {"learing_rate": 0.1}}, "train.learing_rate: unknown key; did you mean learning_rate?"),
    ({"tarin": {}}, "tarin: unknown key; did you mean train?"),
    ({"model": {"source": "def build"}}, "model.source: is read from the file that model.name names; remove it"),
    ({"model": {"kind": 1}}, "model.kind: unknown key; known: name, options, weights, frozen"),
    ({"train": {"learning_rate": "1e-3"}}, "train.learning_rate: '1e-3' is text, not a number; write 0.001"),
    ({"train": {"learning_rate": "1e1"}}, "train.learning_rate: '1e1' is text, not a number; write 10"),
    ({"train": {"epochs": "1e1"}}, "train.epochs: '1e1' is text, not a number; write 10"),
    ({"train": {"epochs": "1.5"}}, "train.epochs: '1.5' is text, not a number; write 1"),
    ({"train": {"epochs": "ten"}}, "train.epochs: 'ten' is text, not a number"),
    ({"train": {"learning_rate": "inf"}}, "train.learning_rate: 'inf' is text, not a number"),
    ({"train": {"epochs": 0}}, "train.epochs: 0 is wrong; it must be greater than or equal to 1"),
    ({"train": {"epochs": [1]}}, "train.epochs: [1] is wrong; it must be a valid integer"),
    ({"model": {"list": 3}}, "model.list: unknown key; known: name, options, weights, frozen"),
    ({"model": {"word": 3}}, "model.word: unknown key; known: name, options, weights, frozen"),
    ({"dist": {"lanes_per_rank": "aut"}}, "dist.lanes_per_rank: 'aut' is wrong; it must be 'auto'"),
    ({"dist": {"lanes_per_rank": 3}}, "dist.lanes_per_rank: 3 is wrong; it must be a valid list"),
    ({"dist": {"lanes_per_rank": [1, 3.5]}}, "dist.lanes_per_rank.1: 3.5 is wrong; it must be a valid integer"),
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
    path.write_text("[" * 5000)
    with pytest.raises(ConfigError, match=rf"^{path}: not YAML: maximum recursion depth exceeded"):
        load(path)
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
    assert isinstance(unknown("data.name", "fashion-minst", catalogue), ConfigError)
    assert str(unknown("data.name", "fashion-minst", catalogue)) == "data.name: 'fashion-minst' is unknown; did you mean fashion-mnist?"
    assert str(unknown("data.name", "stl1", catalogue)) == "data.name: 'stl1' is unknown; did you mean stl10?"
    assert str(unknown("data.name", "imagenet", catalogue)) == "data.name: 'imagenet' is unknown; known: fashion-mnist, cifar10, stl10"
