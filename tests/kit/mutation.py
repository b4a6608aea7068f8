"""`make mutate`: breaks a module in every small way, one at a time, and asks its tests which of these they notice.

A mutant runs in a fork of a process that has torch and pytest loaded, so it costs its tests only. tests/mutation.yaml says which
tests judge a module, and which of its mutants no test needs to notice, and why.
"""

import argparse
import ast
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

import hypothesis
import pytest
import yaml

from tests.kit.mutants import Mutant, file_of, mutants

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "mutation.yaml"
OPTIONS = ["-x", "-q", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", "--hypothesis-profile=mutation", "-m", "not slow"]
SPARE_BYTES = 4 << 30


class QuickestFirst:
    """A plugin of pytest: sorts tests by the seconds that they took without a mutation, and writes down what they take now."""

    def __init__(self, seconds: Path):
        self._seconds = seconds
        self._known: dict[str, float] = json.loads(seconds.read_text()) if seconds.exists() else {}
        self._taken: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._known.get(item.nodeid, 0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._taken[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        if not self._known:
            self._seconds.write_text(json.dumps(self._taken))


class Mutated(SourceFileLoader):
    """Loads one module of the package from a changed syntax tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module):
        super().__init__(name, str(path))
        self._code = compile(tree, str(path), "exec")

    def get_code(self, fullname: str) -> CodeType:
        return self._code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Stands first in `sys.meta_path`."""
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None


def load(tests: list[str]) -> None:
    """Import all that the tests import, and forget what is ours: a fork imports that anew, changed."""
    # The first example that fails is enough: no time goes into a smaller one.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutation", derandomize=True, database=None, deadline=None, max_examples=100, phases=phases)
    # DDP loads it when it is first built.
    importlib.import_module("torch._dynamo")
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main([*OPTIONS, "--collect-only", *tests])
    for name in [name for name in sys.modules if name.split(".")[0] in ("pipeline", "tests")]:
        if name not in (__name__, Mutant.__module__):
            del sys.modules[name]
    # What a fork need not look through.
    gc.collect()
    gc.freeze()


def judge(name: str, path: Path, tree: ast.Module, tests: list[str], output: Path) -> None:
    """Run the tests on a changed module and end this process with pytest's exit code."""
    code = 1
    try:
        os.setsid()
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + SPARE_BYTES, used_bytes + SPARE_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (SPARE_BYTES, SPARE_BYTES))
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.meta_path.insert(0, Mutated(name, path, tree))
        plugin = QuickestFirst(output.with_name("seconds.json"))
        code = int(pytest.main([*OPTIONS, f"--basetemp={output.with_name('pytest')}", *tests], [plugin]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def outcome(name: str, path: Path, tree: ast.Module, tests: list[str], limit_seconds: float, folder: Path) -> int | None:
    """Return what pytest ended with in a process of its own; None if it did not end in time."""
    pid = os.fork()
    if pid == 0:
        judge(name, path, tree, tests, folder / "output.txt")
    descriptor = os.pidfd_open(pid)
    try:
        ended = select.select([descriptor], [], [], limit_seconds)[0]
    finally:
        os.close(descriptor)
        # With all that it started.
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status) if ended else None


def survivors(module: str, tests: list[str], wanted: str, every: int) -> tuple[list[Mutant], int]:
    """Return the mutants of a module that its tests did not notice, and how many were tried."""
    name = f"pipeline.{module}"
    path = file_of(module)
    tree = ast.parse(path.read_text())
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as scratch:
        folder = Path(scratch)
        started_at = time.monotonic()
        if outcome(name, path, tree, tests, 600, folder) != 0:
            sys.exit(f"{module}: its tests fail without a mutation:\n{(folder / 'output.txt').read_text()[-3000:]}")
        seconds = time.monotonic() - started_at
        tried = [mutant for mutant in mutants(tree) if wanted in mutant.key][::every]
        print(f"{module}: {len(tried)} mutants, {seconds:.1f} s of tests", flush=True)
        alive = []
        for mutant in tried:
            before = mutant.apply()
            if outcome(name, path, tree, tests, 10 + 5 * seconds, folder) == 0:
                alive.append(mutant)
                print(f"  {path.relative_to(ROOT)}:{mutant.line}: {mutant.key}", flush=True)
            Mutant(**vars(mutant) | {"replacement": before}).apply()
    return alive, len(tried)


def main() -> int:
    """Exit 1 if a mutant survives that the list does not explain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", nargs="?", default="", help="one of tests/mutation.yaml, such as config or parallel.lanes; else all")
    parser.add_argument("--only", default="", help="only mutants whose line in the report contains this")
    parser.add_argument("--every", type=int, default=1, help="only every nth mutant")
    asked = parser.parse_args()
    listed: dict[str, dict[str, Any]] = yaml.safe_load(LIST.read_text())
    chosen = [module for module in listed if not asked.module or module == asked.module or module.endswith(f".{asked.module}")]
    if not chosen:
        parser.error(f"{asked.module} is not in {LIST.name}: {', '.join(listed)}")
    os.chdir(ROOT)
    load([test for module in chosen for test in listed[module]["tests"]])
    unexplained = 0
    for module in chosen:
        explained = {key: why for why, keys in listed[module].get("survivors", {}).items() for key in keys}
        alive, count = survivors(module, listed[module]["tests"], asked.only, asked.every)
        new = [mutant for mutant in alive if mutant.key not in explained]
        unexplained += len(new)
        print(f"{module}: killed {count - len(alive)} of {count}; explained {len(alive) - len(new)}, not explained {len(new)}", flush=True)
        if asked.every == 1 and not asked.only and (stale := explained.keys() - {mutant.key for mutant in alive}):
            print("  no longer survive, take them off the list:", *sorted(stale), sep="\n    ")
    return min(unexplained, 1)


if __name__ == "__main__":
    sys.exit(main())
