"""Every level of docs/levels.md ends in the figure that the page prints, and all in the same digest."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.commands.test_pipeline import run, runs
from tests.kit.checkout import clone_of
from tests.kit.documents import commands, is_level
from tests.kit.experiment import ROOT, database

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_level_ends_in_the_figure_of_the_page_and_in_one_digest(tmp_path: Path) -> None:
    clone = clone_of(tmp_path / "clone")
    (clone / ".venv").symlink_to(ROOT / ".venv")
    (clone / "mlflow.db").write_bytes(database())
    if (ROOT / "data/raw/fashion-mnist").is_dir():
        shutil.copytree(ROOT / "data/raw", clone / "data/raw")
    (promised,) = set(re.findall(r"`(epoch 2/2 .*?)`", (clone / "docs/levels.md").read_text()))
    found = {command: run(clone, command) for command in commands() if is_level(command)}
    levels = {command.split()[1] for command in found}
    assert levels | {"containers"} == {path.parent.name for path in clone.glob("levels/*/params.yaml")}
    for command, said in found.items():
        (line,) = re.findall(r"^epoch 2/2 .*$", said, re.MULTILINE)
        # Another kind of CPU rounds otherwise.
        assert numbers(line) == pytest.approx(numbers(promised), abs=0.02), command
    receipts = [json.loads((clone / "levels" / level / "models/receipt.json").read_text()) for level in levels]
    assert len({one["weights_sha256"] for one in receipts}) == 1
    assert all(said.count(receipts[0]["weights_sha256"]) == 1 for said in found.values())
    assert [one.info.status for one in runs(clone)] == ["FINISHED"] * len(levels)
    assert all(one.info.artifact_uri.startswith((clone / "mlartifacts").as_uri()) for one in runs(clone))
    assert len({(one["placement"]["world_size"], str(one["parameters"]["dist"])) for one in receipts}) == len(levels)


def numbers(line: str) -> list[float]:
    return [float(one) for one in re.findall(r"\d+\.\d+", line)]


def test_both_languages_have_the_same_commands_and_figures() -> None:
    one, other = ((ROOT / "docs" / name).read_text() for name in ("levels.md", "levels.zh.md"))
    for pattern in (r"^```sh\n.*?^```", r"`epoch .*?`", r"^## \d", r"`pipeline/[\w./]+`", r"`dist\.[\w: ]+`"):
        in_both = [re.findall(pattern, text, re.MULTILINE | re.DOTALL) for text in (one, other)]
        assert in_both[0] == in_both[1] != []


def test_levels_differ_in_placement_alone() -> None:
    read = [yaml.safe_load(path.read_text()) for path in ROOT.glob("levels/*/params.yaml")]
    assert all({**one, "dist": None} == {**read[0], "dist": None} for one in read)
