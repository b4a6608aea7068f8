"""What the documents say about this tree is true; their commands are run in tests/commands and tests/containers."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline import verify
from pipeline.config import ConfigError, DataError, MachineError, PeerError
from pipeline.config.params import load
from pipeline.runs import status
from tests.kit.documents import ELSEWHERE, INSTEAD, PAGES, commands, spans
from tests.kit.experiment import ROOT

DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PROGRAM = re.compile(r"(?:[A-Z]+=\S+ )*(?:make|dvc|docker|python|\. \.venv)\b")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_in_a_sentence_is_run_or_says_why_not(page: Path) -> None:
    known = [*commands(), *ELSEWHERE]
    for span in spans(page):
        # `there` of the tutorials are other people's commands.
        if PROGRAM.match(span) and " " in span:
            assert any(one == span or one.startswith(f"{span} ") for one in known), f"{span}: no test runs it"


def test_the_tables_of_what_is_not_run_name_only_what_the_documents_say() -> None:
    said = {span for page in PAGES for span in spans(page)}
    assert set(INSTEAD) <= set(commands())
    assert set(ELSEWHERE) <= said
    assert not set(ELSEWHERE) & set(commands())


# What the tutorials set: model, ranks, global batch, learning rate, momentum, weight decay.
TUTORIALS = {
    "fleet": ("resnet18", 2, 64, 0.05, 0.9, 1e-4),
    "lenet": ("lenet", 2, 256, 0.2, 0.0, 0.0),
    "resnet18-1-rank": ("resnet18", 1, 256, 0.1, 0.0, 0.0),
    "resnet18-2-ranks": ("resnet18", 2, 512, 0.2, 0.0, 0.0),
}


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("experiments/*")))
def test_every_named_experiment_has_the_settings_of_its_tutorial(name: str, tmp_path: Path) -> None:
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    words = (ROOT / "experiments" / name).read_text().split()
    for flag, change in zip(words[::2], words[1::2], strict=True):
        key, value = change.split("=")
        section, setting = key.split(".")
        assert (flag, setting in values[section]) == ("-S", True)
        values[section][setting] = yaml.safe_load(value)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    config = load(tmp_path / "params.yaml")
    train, dist = config.train, config.dist
    found = (config.model.name, dist.world_size, dist.images_per_step, train.learning_rate, train.momentum, train.weight_decay)
    assert found == TUTORIALS[name]
    assert (train.schedule, train.warmup_epochs, train.optimizer) == ("constant", 0, "sgd")


@pytest.mark.parametrize("path", sorted(ROOT.glob("levels/*/params.yaml")), ids=lambda path: path.parent.name)
def test_every_level_has_the_same_global_batch_and_lanes(path: Path) -> None:
    dist = load(path).dist
    assert (dist.images_per_step, dist.lanes, dist.reduction) == (256, 8, "ordered")


def test_contributing_has_a_row_for_every_target_of_the_makefile_and_no_other() -> None:
    # This may itself have been started by make, which would say which folder it enters.
    help_text = subprocess.check_output(["env", "-u", "MAKELEVEL", "-u", "MAKEFLAGS", "make"], cwd=ROOT, text=True)
    targets = {line.split()[1] for line in help_text.splitlines()}
    rows = re.findall(r"^\| (`make.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = {word for row in rows for word in re.findall(r"`make ?([a-z-]*)", row)} - {""}
    assert named | {"help", "setup"} == targets


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS, ROOT / "CHANGELOG.md"], ids=name)
def test_every_link_and_every_path_in_a_document_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for path in set(re.findall(r"`((?:pipeline|tests|bench|docs|deploy)/[\w./-]+)", text)):
        assert (ROOT / path).exists(), path


def test_the_page_of_exit_codes_has_a_row_for_every_code_of_the_source() -> None:
    errors = {error.exit_code for error in (ConfigError, DataError, MachineError, PeerError)}
    rows = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs" / "exit-codes.md").read_text(), re.MULTILINE)
    named = {int(code) for row in rows for code in row.split(",")}
    # 5 is a rank's own.
    assert named == errors | {0, 5, verify.DIVERGED, status.STOPPED, status.INTERRUPTED, status.TERMINATED}


def test_the_readme_is_short_and_links_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 140
    assert all(f"({name(page)})" in text for page in PAGES if page.parent == ROOT / "docs")
