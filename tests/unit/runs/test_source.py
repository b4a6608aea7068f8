"""Which source is part of the fingerprint: what computes in an experiment, and nothing else."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import Config, ConfigError
from pipeline.runs import source
from pipeline.runs.source import EVALUATE, RECORDS, source_digests
from tests.kit.experiment import ROOT

SYNTAX = """
from __future__ import annotations
import dataclasses as d

@d.dataclass(frozen=True)
class Point(tuple[int, int]):
    x: int = 1
    def __add__(self, other: Point, /, *rest: int, key: str | None = None, **more: bytes) -> Point: ...

async def f(a, b=2):
    async with a as c, b:
        return [await g async for g in c if g]

def text(value: float, width: int = 3) -> str:
    match value:
        case {"a": [1, *_], **rest} | Point(x=0) as p if rest:
            return f"{value!r:>{width}} {value=} {{}}" + str(rb"\\x") + "\\N{BULLET}" + u"old"
    try:
        return (lambda *a, k=1, **b: a)(*[1], **{}) and "a" f"b{value:.3f}" "c"
    except* (ValueError, KeyError) as error:
        raise RuntimeError from error
    finally:
        del value
"""
LENET = Config.model_validate({"model": {"name": "lenet"}})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package to edit."""
    copy = tmp_path / "pipeline"
    shutil.copytree(source.PACKAGE, copy)
    monkeypatch.setattr(source, "PACKAGE", copy)
    return copy


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_what_computes_nothing_can_change_without_another_experiment(package: Path) -> None:
    here = source_digests(LENET)
    # Comments, docstrings, line breaks.
    edit(package / "models" / "lenet.py", "\nSMALLEST_SIDE", "\n# How small.\n\n\nSMALLEST_SIDE")
    edit(package / "models" / "lenet.py", '"""The LeNet of the tutorials', '"""Now with another docstring')
    edit(package / "models" / "lenet.py", "nn.ReLU(inplace=True),\n        nn.AvgPool2d(2),", "nn.ReLU(inplace=True), nn.AvgPool2d(2),")
    edit(package / "training" / "loop.py", "class Speed:\n", "class Speed:  # images\n")
    # A new model, and other experiments' files.
    (package / "models" / "alexnet.py").write_text("a new model")
    edit(package / "models" / "__init__.py", "CATALOGUE = {\n", 'CATALOGUE = {\n    "alexnet": "pipeline.models.alexnet",\n')
    for other in ("models/mlp.py", "models/zoo.py", "data/fashion_mnist.py", "data/synthetic.py", "training/evaluate_rank.py", "stage.py"):
        (package / other).write_text("another's")
    # What type checkers read, and what only records.
    edit(package / "parallel" / "__init__.py", "if TYPE_CHECKING:\n", "if TYPE_CHECKING:\n    from pipeline.models import lenet\n")
    for record in RECORDS:
        assert package.joinpath(*record.split(".")).with_suffix(".py").exists(), record
        package.joinpath(*record.split(".")).with_suffix(".py").write_text("only records")
    assert source_digests(LENET) == here


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("models/lenet.py", "nn.AvgPool2d(2)", "nn.MaxPool2d(2)"),
        ("models/lenet.py", "nn.Conv2d(channels, 20, 3)", "nn.Conv2d(channels, 21, 3)"),
        ("parallel/ordered.py", "fold(", "unfold("),
        ("parallel/lanes.py", "cross_entropy(", "nll_loss("),
        ("parallel/ddp.py", "DistributedDataParallel(", "DataParallel("),
        ("data/batches.py", "tensor(255.0", "tensor(256.0"),
        ("training/schedule.py", "math.cos", "math.sin"),
        ("training/train_rank.py", 'deterministic_debug_mode("error")', 'deterministic_debug_mode("warn")'),
        ("config/__init__.py", "[:8]", "[:7]"),
        ("hardware/environment.py", ":4096:8", ":16:8"),
    ],
)
def test_a_line_that_computes_is_another_experiment(package: Path, file: str, old: str, new: str) -> None:
    here = source_digests(LENET)
    edit(package / file, old, new)
    now = source_digests(LENET)
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert {key for key in here.keys() | now.keys() if here.get(key) != now.get(key)} == {name}


@pytest.mark.parametrize(
    "lines",
    [
        "import pipeline.models.zoo",
        "from pipeline.models import zoo",
        "from pipeline.models.zoo import build",
        "if SMALLEST_SIDE:\n    import pipeline.models.zoo",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import pipeline.models.zoo",
    ],
)
def test_a_module_counts_however_it_is_imported(package: Path, lines: str) -> None:
    (package / "models" / "lenet.py").write_text(f"{lines}\n")
    assert "models.zoo" in source_digests(LENET)


def test_a_package_of_others_is_not_ours_of_the_same_name(package: Path) -> None:
    (package / "models" / "lenet.py").write_text("import stage\nfrom sync import run\n")
    assert not {"stage", "sync"} & source_digests(LENET).keys()


def test_what_records_is_left_out_and_evaluating_begins_elsewhere() -> None:
    records = {
        "files",
        "heartbeat",
        "job",
        "runs.checkpoints",
        "tracking.journal",
        "timeouts",
        "models.torchvision_names",
        "training.stopping",
    }
    assert not records & source_digests(LENET).keys()
    assert not records & source_digests(LENET, EVALUATE).keys()
    assert ["training.evaluate_rank" in one for one in (source_digests(LENET, EVALUATE), source_digests(LENET))] == [True, False]


def test_another_model_or_strategy_is_another_source() -> None:
    sources = [source_digests(Config.model_validate({"model": {"name": name}})) for name in ("lenet", "mlp", "torchvision:resnet50")]
    assert ["models.lenet" in one for one in sources] == [True, False, False]
    assert ["models.zoo" in one for one in sources] == [False, False, True]


@pytest.mark.parametrize("name", ["lenet", "resnet18", "torchvision:squeezenet1_1"])
def test_it_is_exactly_what_a_rank_imports_but_for_what_only_records(name: str) -> None:
    code = (
        "import importlib, sys\n"
        "from pipeline import models, parallel\n"
        "from pipeline.training import train_rank\n"
        f"models.build({name!r}, 3, 32, 10)\n"
        "importlib.import_module(parallel.CATALOGUE['ddp'])\n"
        "print(*(name.removeprefix('pipeline.') for name in sys.modules if name.split('.')[0] == 'pipeline'))"
    )
    imported = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    packages_of_records = {record.rpartition(".")[0] for record in RECORDS}
    counted = set(source_digests(Config.model_validate({"model": {"name": name}}))) | {"pipeline"}
    assert counted - set(imported) == {"__init__"}
    assert set(imported) - counted <= set(RECORDS) | packages_of_records


def test_source_that_is_not_python_is_named(package: Path) -> None:
    (package / "training" / "loop.py").write_text("\nthis is no Python\n")
    with pytest.raises(ConfigError, match=r"training/loop\.py:2: not Python: invalid syntax"):
        source_digests(LENET)


def test_every_python_gives_the_same_digest(package: Path) -> None:
    """The syntax trees of 3.11, 3.12 and 3.13 differ; f-strings, decorators, classes and generics are where."""
    (package / "models" / "lenet.py").write_text(SYNTAX)
    assert source_digests(LENET)["models.lenet"] == "21b8cdf47433ffd1"


def test_what_only_records_does_not_import_what_computes() -> None:
    for record in RECORDS:
        tree = ast.parse(source.PACKAGE.joinpath(*record.split(".")).with_suffix(".py").read_text())
        imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [line for line in imports if line.split()[1].split(".")[0] in ("torch", "numpy", "safetensors")], record
