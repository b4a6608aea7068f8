"""The source that computes in one experiment: every module that a rank of it imports, by its syntax tree."""

import ast
import functools
import hashlib
from pathlib import Path

from pipeline import models, parallel
from pipeline.config import Config, ConfigError

PACKAGE = Path(__file__).parents[1]
TRAIN, EVALUATE = "training.train_rank", "training.evaluate_rank"
# What a rank imports and what cannot change a bit of its result, with the reason.
RECORDS = (
    # Writes files whole and locks them; what a rank reads back is checked by SHA-256.
    "files",
    # Writes where a rank is, for the launcher; no rank reads it.
    "heartbeat",
    # Carries values; those that compute are in the identity.
    "job",
    # Chooses one of this fingerprint's checkpoints, each proven by SHA-256; going on from any gives the same bits.
    "runs.checkpoints",
    # Writes the figures after they are computed.
    "tracking.journal",
    # Says how long to wait, never what to compute.
    "timeouts",
    # Names for `check`, which runs before any rank.
    "models.torchvision_names",
    # Chooses the step to stop at; going on from any step gives the same bits.
    "training.stopping",
)


def source_digests(config: Config, *entries: str) -> dict[str, str]:
    """A digest for every module that a rank of this experiment imports and that computes.

    Comments, docstrings, line breaks and what else stands in a catalogue do not change it. Python 3.11 to 3.13 give the same.
    """
    found: dict[str, str] = {}
    left = [*(entries or [TRAIN]), *(name.removeprefix("pipeline.") for name in _chosen(config))]
    if config.model.source is not None:
        own = _module(config.model.source.encode()).imports
        # By `build` it may take any of them.
        left += [*own, *(name.removeprefix("pipeline.") for name in models.CATALOGUE.values() if "models" in own)]
    while left:
        name = left.pop()
        path = _file(name)
        if path is None or name in found or name in RECORDS:
            continue
        try:
            module = _module(path.read_bytes())
        except SyntaxError as error:
            raise ConfigError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
        found[name] = hashlib.sha256("\0".join(module.words).encode()).hexdigest()[:16]
        left += [*module.imports, name.rpartition(".")[0] or "__init__"]
    return dict(sorted(found.items()))


def _chosen(config: Config) -> list[str]:
    """The entries of the catalogues that a rank of this experiment imports; its data set is imported by `prepare` alone."""
    return [models.module_of(config.model.name), parallel.CATALOGUE[config.dist.strategy]]


def _file(name: str) -> Path | None:
    """The file of one of our modules; None for a name within a module."""
    path = PACKAGE.joinpath(*name.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@functools.cache
def _module(source: bytes) -> "_Module":
    return _Module(ast.parse(source))


class _Module:
    """A syntax tree as words, and which of our modules it imports."""

    def __init__(self, tree: ast.Module):
        self.words: list[str] = []
        self.imports: list[str] = []
        self._add(tree)

    def _add(self, node: ast.AST) -> None:
        if _has_no_effect(node):
            return
        if isinstance(node, ast.Import):
            self._note(*(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            self._note(f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.JoinedStr):
            # Python 3.12.1 puts empty pieces into some f-strings.
            node.values = [piece for piece in node.values if not (isinstance(piece, ast.Constant) and piece.value == "")]
        self.words.append(type(node).__name__)
        for field in node._fields:
            value = getattr(node, field, None)
            # Python 3.12 has fields that 3.11 lacks; they are empty where the source could be 3.11's.
            if value is None or value == []:
                continue
            self.words.append(field)
            if isinstance(value, list):
                for one in value:
                    self._add(one) if isinstance(one, ast.AST) else self.words.append(repr(one))
            elif isinstance(value, ast.AST):
                self._add(value)
            else:
                self.words.append(repr(value))
        self.words.append("")

    def _note(self, *names: str) -> None:
        self.imports += [name.removeprefix("pipeline.") for name in names if name.startswith("pipeline.")]


def _has_no_effect(node: ast.AST) -> bool:
    """True for docstrings, imports for type checkers, and catalogues, whose chosen entries are named by the identity."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" and not node.orelse
    return isinstance(node, ast.Assign) and [ast.dump(target) for target in node.targets] == ["Name(id='CATALOGUE', ctx=Store())"]
