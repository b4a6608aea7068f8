"""The compare command: a table and a page of several runs, from their journals and receipts alone."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from pipeline.compare.answers import answers
from pipeline.compare.groups import grouped
from pipeline.compare.page import page
from pipeline.compare.results import JOURNAL, Result, read_result, within
from pipeline.compare.table import as_text, experiments
from pipeline.config import Config, ConfigError, DataError, MachineError
from pipeline.files import Paths, atomic_write


def run(_: Config, paths: Paths, results: list[Path], html: Path | None) -> int:
    """Print how runs compare, and write a page; a damaged run is named, and the others are compared."""
    whats = (
        [one for what in results for one in within(what)] if results else sorted(path.parent for path in paths.runs.glob(f"*/{JOURNAL}"))
    )
    if not whats:
        raise ConfigError(f"{paths.runs}: no run is there; run: python -m pipeline train")
    found, code = read_all(whats, paths)
    if not found:
        return code
    groups = grouped(named_alike(found))
    target = html or paths.root / "compare.html"
    print(as_text(experiments(groups)), end="\n\n")
    for question, answer in answers(groups, paths.params):
        print(f"{question}: {answer}")
    atomic_write(target, page(groups, paths.params).encode())
    print(f"The curves: {target}")
    return code


def read_all(whats: list[Path], paths: Paths) -> tuple[list[Result], int]:
    """Return the runs, each once, and the exit code of the worst damage."""
    found: dict[str, Result] = {}
    codes = [0]
    for what in whats:
        try:
            result = read_result(what, paths.runs)
        except (ConfigError, DataError, MachineError) as error:
            if len(whats) == 1:
                raise
            # The others may be sound.
            print(error, file=sys.stderr)
            codes.append(error.exit_code)
            continue
        found.setdefault(result.journal, result)
    return list(found.values()), max(codes)


def named_alike(results: list[Result]) -> list[Result]:
    """Name runs as one would type them here, and not by where this machine has them."""
    return [replace(result, name=os.path.relpath(result.name)) for result in results]
