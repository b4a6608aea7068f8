"""params.yaml: what is wrong is said in one line, within two seconds, before torch is imported."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.config import Config, ConfigError
from pipeline.config.params import load
from tests.kit.experiment import ROOT, settings

# What is changed, the exit code, and what the line must say.
WRONG = [
    ({"train__learing_rate": 0.1}, 2, ["train.learing_rate", "unknown key", "did you mean learning_rate?"]),
    ({"tarin": {}}, 2, ["tarin", "did you mean train?"]),
    ({"train__epochs": "ten"}, 2, ["train.epochs", "'ten'", "not a number"]),
    ({"train__learning_rate": "1e-3"}, 2, ["train.learning_rate", "'1e-3'", "write 0.001"]),
    ({"train__epochs": 0}, 2, ["train.epochs", "greater than or equal to 1"]),
    ({"train__learning_rate": -0.1}, 2, ["train.learning_rate", "-0.1", "greater than 0"]),
    ({"dist__lanes": 1}, 2, ["lanes", "world_size", "at least 2"]),
    ({"dist__lanes": 5}, 2, ["lanes", "does not divide the global batch (96)"]),
    ({"dist__backend": "nccl"}, 4, ["dist.backend", "nccl", "set backend: gloo"]),
    ({"data__name": "fashion-minst"}, 2, ["data.name", "did you mean fashion-mnist?"]),
    ({"model__name": "lenett"}, 2, ["model.name", "did you mean lenet?"]),
    ({"model__name": "torchvision:resnet51"}, 2, ["model.name", "did you mean torchvision:resnet50?"]),
    ({"dist__strategy": "dpp"}, 2, ["dist.strategy", "did you mean ddp?"]),
    ({"dist__reduction": "native"}, 2, ["lanes", "set lanes: null"]),
    ({"dist__lanes_per_rank": [1, 2]}, 2, ["lanes_per_rank", "add up to lanes (4)"]),
    ({"train__optimizer": "adamw", "train__momentum": 0.9}, 2, ["momentum", "set momentum: null"]),
    ({"train__momentum": True}, 2, ["train.momentum", "true"]),
    ({"seed": None}, 2, ["seed: null is wrong"]),
    ({"data": {"name": "synthetic:1200", "augment": "mixup"}}, 2, ["data.augment: 'mixup' is wrong", "in a list: [mixup]"]),
    (
        {"data": {"name": "synthetic:1200", "augment": "crop-flp"}},
        2,
        ["data.augment: 'crop-flp' is wrong", "or a list of steps such as [crop, flip]"],
    ),
    ({"data": {"name": "synthetic:1200", "augment": {"flip": 1}}}, 2, ["data.augment: {'flip': 1} is wrong", "valid list"]),
    ({"model__name": "resnet50"}, 2, ["did you mean torchvision:resnet50?"]),
    ({"data": "fashion-mnist"}, 2, ["data", "'fashion-mnist'", "section"]),
    ({"train__warmup_epochs": 3}, 2, ["warmup_epochs", "3 is more than epochs (2)"]),
    ({"dist__nodes": 2}, 2, ["dist.nodes"]),
    # A name of ours for world_size: auto, and no key.
    ({"dist__auto": True}, 2, ["dist.auto", "unknown key; known: world_size, nodes, backend"]),
]


def children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_train(params: Path) -> tuple[int, str, float]:
    before_seconds = children_cpu_seconds()
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pipeline", "train", "--params", str(params)], cwd=ROOT, capture_output=True, text=True
    )
    cpu_seconds = children_cpu_seconds() - before_seconds
    imported = [line for line in process.stderr.splitlines() if line.startswith("import time:")]
    assert imported, process.stderr
    assert not any(line.split("|")[-1].strip() in ("torch", "mlflow") for line in imported)
    return (
        process.returncode,
        "\n".join(line for line in process.stderr.splitlines() if not line.startswith("import time:")),
        cpu_seconds,
    )


@pytest.mark.parametrize(("changes", "exit_code", "parts"), WRONG, ids=lambda value: str(value) if isinstance(value, dict) else "")
@pytest.mark.fault(23, "unknown keys, wrong types, 1e-3 as text, negative, zero; and placements that cannot be")
def test_a_wrong_setting_is_one_clear_line_within_two_seconds(changes, exit_code: int, parts: list[str], tmp_path: Path) -> None:
    params = tmp_path / "params.yaml"
    params.write_text(yaml.safe_dump(settings(**changes)))
    code, said, cpu_seconds = run_train(params)
    assert code == exit_code, said
    assert len(said.splitlines()) == 1, said
    assert all(part in said for part in parts), said
    # Of the CPU: how long it takes by the clock depends on what else runs.
    assert cpu_seconds < 2


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("seed: 1\ntrain: [", "expected the node content, but found '<stream end>' in line 2"),
        ("train:\n  epochs: 10\n  epochs: 1", "train.epochs: stands twice"),
        ("- 1", "expected sections"),
        ("", "expected sections"),
        (None, "no such file"),
        (b"\xff\xfe\x00", "not YAML"),
    ],
)
@pytest.mark.fault(23, "a file that is missing, empty, a list, not YAML, not text, or names a key twice")
def test_a_file_that_is_no_configuration_is_one_clear_line(content: str | bytes | None, part: str, tmp_path: Path) -> None:
    params = tmp_path / "params.yaml"
    if content is not None:
        params.write_bytes(content.encode() if isinstance(content, str) else content)
    code, said, _ = run_train(params)
    assert code == 2
    assert len(said.splitlines()) == 1
    assert part in said
    assert str(params) in said


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs.*train\.learning_rate"):
        load_from({"train": {"epochs": 0, "learning_rate": 0}})


def load_from(values: dict) -> Config:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "params.yaml")
        path.write_text(yaml.safe_dump(values))
        return load(path)


def test_the_shipped_file_states_the_defaults() -> None:
    assert load(ROOT / "params.yaml") == Config()


def identity(**changes) -> object:
    return Config.model_validate(settings(**changes)).identity("a cpu", "fp32", "gloo")


def test_placement_is_outside_the_identity_and_everything_else_is_inside() -> None:
    here = identity()
    same = [
        {"dist__world_size": 4, "dist__batch_size_per_gpu": 24},
        {"dist__world_size": 1, "dist__batch_size_per_gpu": 96},
        {"dist__world_size": 1, "dist__batch_size_per_gpu": 48, "dist__accumulation": 2},
        {"dist__lanes_per_rank": [3, 1]},
        {"dist__backend": "gloo"},
        {"checkpoint__every_steps": 7},
        {"tracking__experiment": "other"},
        {"data": {"name": "synthetic:1200", "root": "elsewhere"}},
    ]
    other = [
        {"seed": 2},
        {"dist__batch_size_per_gpu": 24},
        {"dist__lanes": 8},
        {"dist__threads_per_rank": 2},
        {"model__name": "mlp"},
        {"train__epochs": 3},
        {"data": {"name": "synthetic:1200", "augment": "crop-flip"}},
        {"dist__reduction": "native", "dist__lanes": None},
    ]
    assert all(identity(**change) == here for change in same)
    assert all(identity(**change) != here for change in other)
    config = Config.model_validate(settings())
    assert config.identity("another cpu", "fp32", "gloo") != here
    assert config.identity("a cpu", "bf16", "gloo") != here


def test_native_reduction_has_its_placement_in_the_identity() -> None:
    native = {"dist__reduction": "native", "dist__lanes": None}
    assert identity(**native) != identity(**native, dist__world_size=4, dist__batch_size_per_gpu=24)


def seconds_of_the_processor(*command: str) -> float:
    """Of the processor, for others may keep it busy."""
    before_seconds = children_cpu_seconds()
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    return children_cpu_seconds() - before_seconds


@pytest.mark.parametrize("command", [["-c", "import pipeline.config"], ["-m", "pipeline", "--help"]])
def test_what_every_user_pays_first_is_small(command: list[str]) -> None:
    # Measured against the libraries it cannot do without, in turn, for machines differ; torch alone would be ten times that.
    libraries = ["-c", "import yaml, pydantic; pydantic.create_model('One', field=int)"]
    pairs = [(seconds_of_the_processor(*command), seconds_of_the_processor(*libraries)) for _ in range(5)]
    assert min(ours for ours, _ in pairs) < 2 * min(theirs for _, theirs in pairs)
