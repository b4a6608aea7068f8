"""What the source of the package imports and reads, by its syntax trees."""

import ast
import re
from pathlib import Path

from tests.kit.experiment import ROOT

PACKAGE = ROOT / "pipeline"
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in MODULES}


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


def touches_distributed(source: str) -> bool:
    """Whether a file imports torch.distributed, by whatever way, or reaches it through torch."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # As in import_module("torch.distributed"); a module that is started is no such name.
            names = [node.value] if node.value == "torch.distributed" else []
        for name in names:
            # What torchrun writes a rank's traceback with.
            known = name.startswith("torch.distributed.elastic.multiprocessing.errors")
            if not known and name.startswith(("torch.distributed", "torch.nn.parallel", "torch._C._distributed")):
                return True
    return False


def reads_rank(source: str) -> bool:
    """Whether a file reads RANK, or does something on one rank only."""
    tree = ast.parse(source)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            if re.search(r"(?<![A-Z_])RANK(?![A-Z_])", node.value):
                return True
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            numbers = {side.value for side in sides if isinstance(side, ast.Constant)}
            # At least 0 is whether there is a rank at all.
            at_least = isinstance(node.ops[0], ast.GtE) and numbers == {0}
            if any(map(is_rank, sides)) and numbers & {0, 1} and not at_least:
                return True
        elif any(map(is_rank, conditions(node))):
            return True
    return False


def conditions(node: ast.AST) -> list[ast.expr]:
    """What a node takes for true or false."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else []


def is_rank(node: ast.AST) -> bool:
    name = ast.unparse(node)
    return name in ("rank", "RANK") or name.endswith((".rank", "get_rank()"))
