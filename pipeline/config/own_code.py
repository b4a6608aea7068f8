"""Code of the user's own, named in params.yaml as `mine.py:build`: a file beside it, and a function in it."""

import ast
import linecache
import re
import sys
import traceback
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions, version
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from pipeline.config import ConfigError, DataError, MachineError

NAME = re.compile(r"([^:]+\.py):([A-Za-z_]\w*)")
# Those that the fingerprint knows of anyway.
KNOWN = {"torch", "torchvision", "numpy", "pipeline"}


def is_own(name: str) -> bool:
    """Return True for the name of a function in a file."""
    return NAME.fullmatch(name) is not None


def read(key: str, name: str, root: Path) -> str:
    """Return what the file holds; raises ConfigError unless it has the function and all it needs. Nothing of it runs."""
    file, function = name.rsplit(":", 1)
    path = root / file
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}; name a file, from the folder of params.yaml on") from None
    except (SyntaxError, ValueError) as error:
        line, said = getattr(error, "lineno", None) or 1, getattr(error, "msg", None) or "it holds bytes that no Python has"
        raise ConfigError(f"{key}: {path}:{line}: {said}") from None
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if function not in found:
        is_class = any(isinstance(node, ast.ClassDef) and node.name == function for node in tree.body)
        said = f"{function} is a class; name a function, which may call it"
        raise ConfigError(f"{key}: {path}: {said if is_class else f'has no function {function}; it has ' + (', '.join(found) or 'none')}")
    wanted = imports(tree) - KNOWN
    installed = packages_distributions() if wanted else {}
    for module in sorted(wanted):
        beside = any(Path(folder, module).is_dir() or Path(folder, f"{module}.py").exists() for folder in {root, path.parent, Path.cwd()})
        if beside or module not in installed:
            cure = f"put it into {path.name}, or install it"
            raise ConfigError(f"{key}: {path}: imports {module}, which is of no installed package and would be in no fingerprint; {cure}")
    return text


def files(root: Path, *names: str) -> tuple[Path, ...]:
    """The files of those names that are of the user's own."""
    return tuple(root / name.rsplit(":", 1)[0] for name in names if is_own(name))


def check_options(key: str, name: str, text: str, options: dict[str, Any]) -> None:
    """Raise ConfigError for an option that the function does not take."""
    function = name.rsplit(":", 1)[1]
    (node,) = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef) and one.name == function][-1:]
    # Channels, side and number of classes come first.
    known = [one.arg for one in [*node.args.posonlyargs, *node.args.args][3:] + node.args.kwonlyargs]
    if unknown := sorted(options.keys() - set(known)) if node.args.kwarg is None else []:
        raise ConfigError(f"{key}.{unknown[0]}: {name} does not take it; it takes {', '.join(known) or 'none'}")


def imports(tree: ast.AST) -> set[str]:
    """The first names of all modules that are imported, but for Python's own."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(("." if node.level else "") + (node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names


def packages(text: str) -> dict[str, str]:
    """The versions of the packages that it imports, of which the fingerprint knows nothing else."""
    wanted = imports(ast.parse(text)) - KNOWN
    known = packages_distributions() if wanted else {}
    return {package: version(package) for one in sorted(wanted) for package in sorted(set(known.get(one, [])))}


class _Text(SourceLoader):
    """Imports a text, whatever the file holds by now."""

    def __init__(self, file: str, text: str):
        self._file, self._text = file, text

    def get_filename(self, fullname: str) -> str:
        return self._file

    def get_data(self, path: str | bytes) -> bytes:
        return self._text.encode()


def load(file: str, text: str) -> ModuleType:
    """Import a text as the module of a file."""
    name = "own_" + re.sub(r"\W", "_", file)
    module = module_from_spec(spec := ModuleSpec(name, _Text(file, text), origin=file))
    assert spec.loader is not None
    # Where dataclasses look for it, and where tracebacks and `inspect` look for its lines.
    sys.modules[name] = module
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    spec.loader.exec_module(module)
    return module


class Blamed:
    """What goes wrong in here is the fault of a file of the user's own: one line, with the place; the whole goes to standard error."""

    def __init__(self, key: str, name: str):
        self._key, self._file = key, name.rsplit(":", 1)[0]

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, ConfigError | DataError | MachineError):
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        traceback.print_exception(error)
        lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == self._file]
        said = (str(error).splitlines() or [""])[0]
        where = f"{self._file}:{lines[-1]}" if lines else self._file
        raise ConfigError(f"{self._key}: {where}: {type(error).__name__}: {said}") from None
