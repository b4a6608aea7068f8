"""The house rules that a test can hold."""

import ast
from pathlib import Path

import pytest
import yaml

from pipeline.__main__ import COMMANDS
from tests.kit.experiment import ROOT

PACKAGE = ROOT / "pipeline"
MODULES = sorted(PACKAGE.rglob("*.py"))
# From the bottom up; rooms of one floor ignore each other.
FLOORS = [
    {"config", "files", "timeouts"},
    {"job", "heartbeat"},
    {"ranks", "hardware"},
    {"data", "models", "parallel", "tracking"},
    {"runs", "console", "report"},
    {"launch", "training"},
    {"cluster", "doctor"},
    {"stage"},
    {"prepare", "train", "evaluate", "sync"},
    {"join"},
    {"lead"},
    {"__main__"},
]
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "base", "core", "misc"}
STAGES = ("prepare", "train", "evaluate")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions; names that are modules of the package are resolved to them."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: an import that does not name its module in full"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {name for name in submodules if name in NAMES}
            names |= known or {node.module}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES:
            # A catalogue's entry, or a module that torchrun is told to run.
            names.add(node.value)
    return names


NAMES = {module_name(path): path for path in MODULES}


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(name) in rooms)


@pytest.mark.parametrize("path", [*MODULES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "bench").glob("*.py"))], ids=str)
def test_a_file_is_small_and_so_are_its_functions(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 250
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 40, node.name
            if path in MODULES:
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                assert len([one for one in arguments if one.arg != "self"]) <= 6, node.name


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    name = module_name(path)
    if name == "pipeline":
        return
    for other in imports(path):
        if other.split(".")[0] != "pipeline" or other == "pipeline" or room(other) == room(name):
            continue
        assert floor(other) < floor(name), f"{name} imports {other}"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_every_module_says_what_it_is_and_none_has_a_name_for_everything(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
    assert path.stem not in FORBIDDEN_NAMES


def closure(name: str) -> set[str]:
    """All modules of the package that a module imports, directly or not, with the packages that hold them."""
    found: set[str] = set()
    left = [name]
    while left:
        module = left.pop()
        if module in found or module not in NAMES:
            continue
        found.add(module)
        left += [other for other in imports(NAMES[module]) if other.split(".")[0] == "pipeline"]
        left += [module.rpartition(".")[0]]
    return found


def test_the_bottom_of_the_house_imports_neither_torch_nor_mlflow() -> None:
    heavy = {"torch", "torchvision", "mlflow", "dvc", "matplotlib"}
    for name in ("config", "files", "job"):
        assert not {one.split(".")[0] for one in imports(NAMES[f"pipeline.{name}"])} & heavy


def test_only_these_touch_torch_distributed() -> None:
    for name, path in NAMES.items():
        allowed = (
            name == "pipeline.ranks"
            or name.startswith("pipeline.parallel.")
            or name in ("pipeline.training.checkpoint", "pipeline.cluster.store", "pipeline.launch.agent")
        )
        touches = {one for one in imports(path) if one.startswith("torch.distributed") or one == "torch.nn.parallel"}
        touches -= {"torch.distributed.elastic.multiprocessing.errors"}
        assert allowed or not touches, name


def test_only_ranks_reads_rank() -> None:
    for name, path in NAMES.items():
        text = path.read_text()
        assert name == "pipeline.ranks" or ('"RANK"' not in text and "rank == 0" not in text and "get_rank" not in text), name


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
        if path == "pipeline/__init__.py":
            continue
        assert any(path == dep or path.startswith(f"{dep}/") for dep in deps), f"{stage} imports {path}"


def test_every_dependency_that_dvc_watches_exists() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    for stage in STAGES:
        for dep in stages[stage]["deps"]:
            assert (ROOT / dep).exists() or dep in ("data/prepared", "models"), dep


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
