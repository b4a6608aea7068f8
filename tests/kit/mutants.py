"""Mutants: the syntax tree of a module with one small fault each, of the kinds that people make.

Not mutated: annotations (but those that pydantic reads), docstrings, assertions, which are for our own mistakes, and what an f-string says.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Without them nothing runs at all.
NEEDED = ("len", "range", "enumerate", "zip", "isinstance", "getattr", "Field")
# What says too little of a change to be shown alone.
PARTS = (ast.Slice, ast.UnaryOp)
# A statement that can be left out; the names that the others bind would be missing.
DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)


@dataclass
class Mutant:
    """One fault: what stands in the place of one node of the tree."""

    key: str
    line: int
    parent: ast.AST
    field: str
    index: int | None
    replacement: ast.AST

    def apply(self) -> ast.AST:
        """Put the replacement in and return what stood there."""
        value = getattr(self.parent, self.field)
        if self.index is None:
            setattr(self.parent, self.field, self.replacement)
            return value
        before, value[self.index] = value[self.index], self.replacement
        return before


def mutants(tree: ast.Module) -> list[Mutant]:
    """Every mutant of a module; its key names the scope and the change, and stays the same when lines move."""
    found: list[Mutant] = []
    count: Counter[str] = Counter()
    for scope, shown, mutant in _walk(tree, "", [], set()):
        target = mutant.parent if shown is mutant.parent else None
        before = _text(shown)
        replaced = mutant.apply()
        after = _text(target or mutant.replacement) if shown in (target, replaced) else _text(shown)
        Mutant(**vars(mutant) | {"replacement": replaced}).apply()
        key = f"{scope or 'module'}: {before} -> {after or 'nothing'}"
        count[key] += 1
        mutant.key = key + (f" ({count[key]})" if count[key] > 1 else "")
        found.append(mutant)
    return found


def _text(node: ast.AST) -> str:
    """Its first line; for a whole function or class, its decorators."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return " ".join(f"@{ast.unparse(one)}" for one in node.decorator_list) + f" {node.name}"
    if isinstance(node, ast.Pass):
        return ""
    if isinstance(node, ast.ExceptHandler):
        return "; ".join(ast.unparse(node).splitlines()[:2])
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).splitlines()[0]


Found = tuple[str, ast.AST, Mutant]


def _walk(parent: ast.AST, scope: str, above: list[ast.AST], bound: set[str]) -> Iterator[Found]:
    """All mutants below a node, each with its scope and the expression or statement that shows it."""
    for field, value in ast.iter_fields(parent):
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or _left_alone(node, parent, field, above):
                continue
            inner, names = scope, bound
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                inner, names = f"{scope}.{node.name}".lstrip("."), set()
            elif isinstance(node, ast.AnnAssign) and isinstance(parent, ast.ClassDef):
                inner = f"{scope}.{ast.unparse(node.target)}"
            shown = node
            if isinstance(node, ast.Constant | ast.Name | ast.Slice | ast.FormattedValue | ast.comprehension):
                # Alone it would not tell where.
                around = [one for one in (*above, parent) if isinstance(one, ast.expr | ast.Assign) and not isinstance(one, PARTS)]
                shown = around[-1] if around else node
            for replacement in _replacements(node, parent, names):
                ast.fix_missing_locations(ast.copy_location(replacement, node))
                yield inner, shown, Mutant("", getattr(node, "lineno", getattr(parent, "lineno", 0)), parent, field, index, replacement)
            yield from _walk(node, inner, [*above, parent], names)


def _left_alone(node: ast.AST, parent: ast.AST, field: str, above: list[ast.AST]) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert):
        return True
    if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(parent, ast.Module) and isinstance(node, ast.Assign):
        # A type, or the name under which a module logs.
        is_type = isinstance(node.value, ast.Subscript) and not isinstance(node.value.slice, ast.Slice)
        return is_type or ast.unparse(node.value).startswith(("TypeVar(", "logging.getLogger("))
    if field in ("annotation", "returns"):
        reads_annotations = isinstance(parent, ast.AnnAssign) and isinstance(above[-1], ast.ClassDef) and bool(above[-1].bases)
        return not reads_annotations
    # What an f-string says between its values, and how one is formatted.
    return (isinstance(parent, ast.JoinedStr) and isinstance(node, ast.Constant)) or field == "format_spec"


def _replacements(node: ast.AST, parent: ast.AST, bound: set[str]) -> Iterator[ast.AST]:
    if isinstance(node, ast.expr):
        yield from _of_expression(node, parent)
        return
    if isinstance(node, ast.comprehension):
        yield from (_with(node, ifs=_without(node.ifs, index)) for index in range(len(node.ifs)))
    elif isinstance(node, ast.If) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield _with(node, test=_not(node.test))
    elif isinstance(node, ast.While):
        yield _with(node, test=ast.Constant(False))
    elif isinstance(node, ast.With) and not any(item.optional_vars for item in node.items):
        yield ast.If(ast.Constant(True), node.body, [])
    elif isinstance(node, ast.ExceptHandler) and not isinstance(node.body[0], ast.Raise):
        yield _with(node, body=[ast.Raise()])
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield from (_with(node, decorator_list=_without(node.decorator_list, index)) for index in range(len(node.decorator_list)))
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, DROPPED):
        yield ast.Pass()
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        if not names or names <= bound or isinstance(parent, ast.ClassDef):
            yield ast.Pass()
        bound |= names


def _of_expression(node: ast.expr, parent: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            yield from (_with(node, ops=[*node.ops[:index], other(), *node.ops[index + 1 :]]) for other in COMPARISONS[type(op)])
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        yield from (_with(node, values=_without(node.values, index)) for index in range(len(node.values)))
    elif isinstance(node, ast.BinOp) and not (isinstance(node.op, ast.Div) and _is_text(node.right)):
        yield from [_with(node, op=ARITHMETIC[type(node.op)]())] if type(node.op) in ARITHMETIC else [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield _with(node, test=_not(node.test))
    elif isinstance(node, ast.JoinedStr):
        yield ast.Constant("")
    elif isinstance(node, ast.FormattedValue) and node.format_spec is not None:
        yield _with(node, format_spec=None)
    elif isinstance(node, ast.Constant) and not (isinstance(parent, ast.Subscript) and _is_text(node)):
        yield from map(ast.Constant, _other_values(node.value))
    elif isinstance(node, ast.Name) and node.id in FUNCTIONS and isinstance(parent, ast.Call):
        yield _with(node, id=FUNCTIONS[node.id])
    elif isinstance(node, ast.Slice):
        yield from (_with(node, **{part: None}) for part in ("lower", "upper", "step") if getattr(node, part) is not None)
    elif isinstance(node, ast.Call):
        yield from _of_call(node, parent)
    elif isinstance(node, ast.Dict):
        for index in range(len(node.keys)):
            yield _with(node, keys=_without(node.keys, index), values=_without(node.values, index))
    elif isinstance(node, ast.Set) or (isinstance(node, ast.List | ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1):
        yield from (_with(node, elts=_without(node.elts, index)) for index in range(len(node.elts)))


def _of_call(node: ast.Call, parent: ast.AST) -> Iterator[ast.expr]:
    # A statement of its own is dropped whole.
    if not isinstance(parent, ast.Expr | ast.Raise):
        if (isinstance(node.func, ast.Attribute) and not (isinstance(node.func.value, ast.Name) and node.func.value.id.islower())) or (
            isinstance(node.func, ast.Attribute) and not node.args
        ):
            yield node.func.value
        elif node.args and not isinstance(node.args[0], ast.Starred) and ast.unparse(node.func) not in NEEDED:
            yield node.args[0]
    yield from (_with(node, keywords=_without(node.keywords, index)) for index in range(len(node.keywords)))
    if len(node.args) > 1 and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
        yield _with(node, args=[node.args[1], node.args[0], *node.args[2:]])


def _is_text(node: ast.expr) -> bool:
    """Whether it is a path's last part or a dictionary's key, so that any change is a TypeError or a KeyError."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _other_values(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):
        return [value + 1]
    if isinstance(value, str):
        return ["" if value else "mutant"]
    return [b"" if value else b"mutant"] if isinstance(value, bytes) else []


def _with(node, **fields):
    """A copy of a node with other fields; a list of one value that needs more becomes that value."""
    values = fields.get("values")
    if isinstance(node, ast.BoolOp) and values is not None and len(values) == 1:
        return values[0]
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _without(values, index):
    return [*values[:index], *values[index + 1 :]]


def _not(test: ast.expr) -> ast.expr:
    return test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else ast.UnaryOp(ast.Not(), test)


def file_of(module: str) -> Path:
    """Return where a module of the package stands, by its name in tests/mutation.yaml."""
    path = Path(__file__).parents[2].joinpath("pipeline", *module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
