"""No code here unpickles, runs text or starts a shell."""

import ast
import re
from pathlib import Path

import pytest

from tests.kit.experiment import ROOT

# They read what may be a pickle, or text that is run; `torch.export.load` does both.
DANGEROUS = {
    "torch.load",
    "torch.export.load",
    "torch.jit.load",
    "yaml.load",
    "yaml.unsafe_load",
    "eval",
    "exec",
    "__import__",
    "os.system",
}
DANGEROUS_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "tarfile", "zipfile"}
# An error.
HARMLESS = ("pickle.UnpicklingError",)
DANGEROUS_ARGUMENTS = {"allow_pickle", "weights_only", "shell"}


def dangers(source: str) -> list[str]:
    """Return what in some code can unpickle, run text or start a shell, with its line, by whatever name it is imported."""
    tree = ast.parse(source)
    # What each name of the file stands for: `from torch import load as read` makes `read` torch.load.
    meant: dict[str, str] = {}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                unsafe = name in DANGEROUS or (name.partition(".")[0] in DANGEROUS_MODULES and name not in HARMLESS)
                meant[alias.asname or alias.name.partition(".")[0]] = name if alias.asname or module else name.partition(".")[0]
                found += [f"{node.lineno}: {name}"] if unsafe else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, dot, rest = ast.unparse(node).partition(".")
            name = f"{meant.get(first, first)}{dot}{rest}"
            found += [f"{node.lineno}: {name}"] if name in DANGEROUS else []
        elif isinstance(node, ast.Call):
            found += [f"{node.lineno}: {word.arg}=" for word in node.keywords if word.arg in DANGEROUS_ARGUMENTS]
    return found


@pytest.mark.parametrize("path", sorted([*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "bench").glob("*.py")]), ids=str)
def test_no_code_here_unpickles_evaluates_text_or_loads_a_program(path: Path) -> None:
    lines = path.read_text().splitlines()
    found = dangers(path.read_text())
    if path.parent.name == "bench" or path.name == "pretrained.py":
        # A plain training script as others write it reads its own checkpoints; model.weights may be what torch.save wrote.
        found = [one for one in found if not re.search(r"torch\.load\(.*weights_only=True\)", lines[int(one.partition(":")[0]) - 1])]
    if path.name == "served_model.py":
        # It goes with a model into MLflow and is run by whoever loads that model, which is a program.
        found = [one for one in found if not one.endswith(": torch.export.load")]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path)",
        "from torch import load\nload(path)",
        "from torch import load as read\nread(path)",
        "from torch import export\nexport.load(path)",
        "import torch.export\ntorch.export.load(path)",
        "import torch\nread = torch.load",
        "from yaml import unsafe_load",
        "import os.path\nos.system(text)",
        "from os import system as sh\nsh(text)",
        "import pickle",
        "from pickle import loads",
        "import numpy\nnumpy.load(path, allow_pickle=True)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "eval(text)",
        "__import__(name)",
    ],
)
def test_a_dangerous_call_is_found_by_whatever_name_it_is_imported(source: str) -> None:
    assert dangers(source)
    assert not dangers("from torch import save\nimport yaml\nsave(x, path)\nyaml.safe_load(text)\nmodel.eval()")
