"""The house rules that a test can hold."""

import ast
import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from pipeline.__main__ import COMMANDS
from pipeline.config import Config
from pipeline.data import store
from tests.kit.experiment import ROOT
from tests.kit.source import MODULES, NAMES, PACKAGE, closure, imports, module_name, reads_rank, touches_distributed

ALL = [*MODULES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "bench").glob("*.py"))]
# From the bottom up; rooms of one floor ignore each other.
FLOORS = [
    {"config", "files", "output", "pictures", "process_tree", "timeouts"},
    {"job", "heartbeat", "stop_signals", "collectives", "order_of_sums"},
    {"ranks", "hardware", "forkserver", "lanes_at_once"},
    {"data", "models", "parallel", "tracking"},
    {"runs", "console", "report"},
    {"launch", "training"},
    {"cluster"},
    {"elastic"},
    {"plan", "observer"},
    {"stage", "doctor"},
    {"prepare", "train", "evaluate", "sync", "compare", "watch"},
    {"join", "sweep", "verify"},
    {"lead"},
    {"__main__"},
]
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "base", "core", "misc"}
STAGES = ("prepare", "train", "evaluate")
# What runs in prepare and cannot change a byte of its data, which may take hours: what parses the command line; says where files lie, locks
# them and writes them whole; ends the processes that decode; says how many there may be.
NOT_IN_DATA = {f"pipeline.{name}" for name in ("__main__", "files", "process_tree", "hardware", "hardware.cgroup")}


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(name) in rooms)


@pytest.mark.parametrize("path", ALL, ids=str)
def test_a_file_is_small_and_so_are_its_functions(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 250
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 40, node.name
            if path in MODULES:
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                assert len([one for one in arguments if one.arg != "self"]) <= 6, node.name


def test_the_room_that_starts_ranks_stays_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in (PACKAGE / "launch").glob("*.py")) <= 900


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    name = module_name(path)
    if name == "pipeline":
        return
    for other in imports(path):
        if other.split(".")[0] != "pipeline" or other == "pipeline" or room(other) == room(name):
            continue
        assert floor(other) < floor(name), f"{name} imports {other}"


@pytest.mark.parametrize("path", ALL, ids=module_name)
def test_every_module_says_what_it_is_and_none_has_a_name_for_everything(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
    assert path.stem not in FORBIDDEN_NAMES


def test_the_bottom_of_the_house_imports_neither_torch_nor_mlflow() -> None:
    heavy = {"torch", "torchvision", "mlflow", "dvc", "matplotlib"}
    for name, path in NAMES.items():
        if room(name) in ("config", "files", "job"):
            assert not {one.split(".")[0] for one in imports(path)} & heavy, name


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.distributed.barrier()",
        "from torch import distributed",
        "from torch import distributed as dist",
        "import torch.distributed as dist",
        "from torch.nn.parallel import DistributedDataParallel",
        "import_module('torch.distributed')",
    ],
)
def test_no_way_to_torch_distributed_is_overlooked(source: str) -> None:
    assert touches_distributed(source)


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['RANK']",
        "os.environ[f'{prefix}RANK']",
        "if rank == 0: pass",
        "if ranks.rank != 0: pass",
        "if 0 == group.rank: pass",
        "if not rank: pass",
        "if group.rank: pass",
        "if rank < 1: pass",
        "write = rank > 0 or late",
        "late and self.rank",
        "if dist.get_rank() == 0: pass",
    ],
)
def test_no_way_to_favour_a_rank_is_overlooked(source: str) -> None:
    assert reads_rank(source)


def test_only_these_touch_torch_distributed() -> None:
    found = {name for name, path in NAMES.items() if touches_distributed(path.read_text())}
    inside = {name for name in found if name.startswith("pipeline.parallel.")}
    others = {"ranks", "training.checkpoint", "cluster.store", "launch.agent", "elastic.agent", "elastic.process_groups"}
    assert found - inside <= {f"pipeline.{name}" for name in others}


def test_only_ranks_reads_rank() -> None:
    assert {name for name, path in NAMES.items() if reads_rank(path.read_text())} == {"pipeline.ranks"}


def test_only_tracking_and_report_import_mlflow_and_no_rank_does() -> None:
    for name, path in NAMES.items():
        if "mlflow" in {one.split(".")[0] for one in imports(path)}:
            assert room(name) in ("tracking", "report"), name
    for entry in ("pipeline.training.train_rank", "pipeline.training.evaluate_rank"):
        for module in closure(entry):
            assert "mlflow" not in {one.split(".")[0] for one in imports(NAMES[module])}, module
            assert "dvc" not in {one.split(".")[0] for one in imports(NAMES[module])}, module


@pytest.mark.parametrize("stage", STAGES)
def test_what_dvc_watches_covers_all_that_a_stage_imports(stage: str) -> None:
    deps = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"][stage]["deps"]
    for module in closure(f"pipeline.{stage}") | {"pipeline.__main__"}:
        path = NAMES[module].relative_to(ROOT).as_posix()
        if path == "pipeline/__init__.py" or (stage == "prepare" and module in NOT_IN_DATA):
            continue
        assert any(path == dep or path.startswith(f"{dep}/") for dep in deps), f"{stage} imports {path}"


def test_prepare_imports_what_its_data_are_said_not_to_depend_on() -> None:
    assert NOT_IN_DATA - {"pipeline.__main__"} <= closure("pipeline.prepare")


def leaves(section: type[BaseModel], prefix: str = "") -> set[str]:
    """The keys of params.yaml, as `dist.world_size`."""
    found: set[str] = set()
    for name, field in section.model_fields.items():
        inner = field.annotation
        nested = isinstance(inner, type) and issubclass(inner, BaseModel)
        found |= leaves(inner, f"{prefix}{name}.") if nested else {prefix + name}
    return found


def watched(stage: str) -> set[str]:
    """The keys whose change makes DVC run a stage again."""
    params = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"][stage].get("params", [])
    return {key for key in leaves(Config) if any(key == one or key.startswith(f"{one}.") for one in params)}


def test_the_params_that_dvc_watches_cover_all_that_a_stage_reads() -> None:
    # How data are kept, which is in the manifest where they are no pixels, and whether there are any.
    made_for = set(store.made_for(Config())) | {"data.store", "data.allow_broken"}
    # What prepare reads is in the manifest, and reaches train with the prepared data.
    assert made_for <= watched("prepare")
    read = set(re.findall(r"config\.(\w+\.?\w*)", (PACKAGE / "prepare.py").read_text())) - {"Config", "draw_seed"}
    assert {key for key in read if key in leaves(Config)} <= made_for
    assert leaves(Config) - made_for <= watched("train")
    # Evaluate takes all from the receipt but where it is to run, which does not change a figure.
    assert set(re.findall(r"\bconfig\.(\w+)", (PACKAGE / "evaluate.py").read_text())) <= {"dist"}


def test_every_dependency_that_dvc_watches_exists() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    for stage in STAGES:
        for dep in stages[stage]["deps"]:
            assert (ROOT / dep).exists() or dep in ("data/prepared", "models"), dep
            assert f"/{dep.split('/')[0]}" not in (ROOT / ".dvcignore").read_text().splitlines(), dep


def test_no_broad_except() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, path
                caught = {ast.unparse(one) for one in (node.type.elts if isinstance(node.type, ast.Tuple) else [node.type])}
                assert not caught & {"Exception", "BaseException"}, path


def pins(lock: str) -> set[str]:
    """What a lock names; every pin with its hashes, and no address."""
    text = (ROOT / lock).read_text()
    assert "://" not in text
    assert "--index" not in text
    found = [line for line in text.splitlines() if line and not line.startswith(("#", " "))]
    assert all("==" in line and line.endswith("\\") for line in found)
    return set(found)


def test_the_locks_have_hashes_and_no_address_and_what_runs_is_in_both() -> None:
    assert pins("requirements.lock") < pins("requirements-dev.lock")


def test_the_image_starts_every_command_by_its_name() -> None:
    (line,) = [line for line in (ROOT / "deploy" / "entrypoint.sh").read_text().splitlines() if ") exec python" in line]
    named = {name.strip() for name in line.split(")")[0].split("|")}
    assert named == {"--help", *COMMANDS}


def test_the_image_builds_on_any_base_as_it_names_no_version_of_python_or_postgresql() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert not re.findall(r"python-?3\.\d+|postgresql[-/]\d+", text)
