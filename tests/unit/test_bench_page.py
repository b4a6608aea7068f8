"""The figures that a bench writes into README.md and docs/performance.md."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import against, page, peak
from tests.kit.experiment import ROOT


class Measured(against.Contest):
    """As many images a second as an arm's name has letters, and twice as many in bf16."""

    def measured(self, arm: str) -> float:
        return float((len(arm) + len(self.speeds[arm])) * (1 + ("bf16" in arm)))


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What two rounds leave."""
    monkeypatch.setattr(against, "torchrun", lambda *_: '{"fp32": 1e9, "bf16": 2e9}')
    models = {}
    for name, one in against.MODELS.items():
        contest = Measured(one, Path("nowhere"), ["bf16", "fp32"])
        for number in range(2):
            contest.round(number)
        shares = {"forward": [0.3, 0.4], "backward": [0.7, 0.6]}
        models[name] = {"images_per_second": contest.speeds, "ratios": contest.ratios(), "share of the peak": contest.shares_of_peak()}
        models[name]["share of a step"] = shares
    return against.conditions(list(models), ["bf16", "fp32"]) | {"commits": dict.fromkeys(models, "1234567"), "models": models}


def test_a_page_has_every_arm_and_the_readme_says_which_precision_is_compared(results: dict[str, Any]) -> None:
    texts = page.texts(results)
    assert "LeNet 3.18 in bf16 and 1.59 in fp32; ResNet-18" in texts["speed"]
    assert " (128 images a rank; " in texts["speed"]
    results["work"]["lenet"] = results["work"]["lenet"] | {"images a rank": 32}
    assert " (images a rank: LeNet 32; ResNet-18 128; MobileNetV3-small 128; " in page.texts(results)["speed"]
    for arm in results["models"]["lenet"]["images_per_second"]:
        assert f"\n| {arm} | " in texts["against"]
    marked = "before\n<!-- speed: by hand -->\nold\n<!-- end of speed -->\nafter\n"
    assert page.filled(marked, texts) == f"before\n<!-- speed: by hand -->\n{texts['speed']}\n<!-- end of speed -->\nafter\n"


def test_a_model_may_be_measured_anew_on_the_same_machine(results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "against.json"
    kept.write_text(json.dumps(results))
    monkeypatch.setattr(page, "KEPT", kept)
    work = {"lenet": {"steps": 7, "images a rank": 3}}
    anew = results | {"commits": {"lenet": "fedcba9"}, "work": work, "models": {"lenet": {"ratios": {"one": [1.0, 2.0]}}}}
    page.refuse_a_mixture(anew, ["lenet"])
    merged = page.merged(results, anew)
    for name in ("commits", "work", "models"):
        assert merged[name] == results[name] | anew[name]
    assert list(merged["models"]) == list(results["models"])
    for name, other in {"machine": "another", "cpu": "family 6, model 207", "cpus": 64, "torch": "3", "precisions": ["fp32"]}.items():
        elsewhere = anew | {name: other}
        assert page.merged(results, elsewhere) == elsewhere
        page.refuse_a_mixture(elsewhere, list(results["models"]))
        with pytest.raises(SystemExit, match=rf"{name}: .*, here .*; measure all models"):
            page.refuse_a_mixture(elsewhere, ["lenet"])


def test_a_page_says_of_which_code_and_work_its_figures_are_and_how_often_each_was_measured(results: dict[str, Any]) -> None:
    for values in results["models"]["lenet"]["images_per_second"].values():
        values *= 2
    text = page.texts(results)["against"]
    assert "2 to 4 rounds in turn" in text
    assert "LeNet at commit 1234567, 400 steps of 128 images a rank; ResNet-18 at" in text


def test_a_commit_is_changed_by_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "ROOT", tmp_path)
    assert against.commit() == "unknown"
    (tmp_path / "bench").mkdir()
    for name in ("run.py", "against.json"):
        (tmp_path / "bench" / name).write_text("1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "bench"], ["commit", "--quiet", "--message", "one"]):
        subprocess.run([*git, *words], check=True)
    name = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    (tmp_path / "bench" / "against.json").write_text("2")
    assert against.commit() == name
    (tmp_path / "bench" / "run.py").write_text("2")
    assert against.commit() == f"{name}, changed"


def test_the_plot_is_drawn(results: dict[str, Any], tmp_path: Path) -> None:
    for name in ("one.svg", "again.svg"):
        page.draw(results["models"], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()
    page.draw({"lenet": results["models"]["lenet"]}, tmp_path / "one.svg")
    assert (tmp_path / "one.svg").read_bytes() != (tmp_path / "again.svg").read_bytes()


@pytest.mark.parametrize("name", page.PAGES)
def test_the_figures_in_a_page_are_those_that_were_kept(name: str) -> None:
    text = (ROOT / name).read_text()
    assert page.filled(text, page.texts(json.loads(page.KEPT.read_text()))) == text


@pytest.mark.parametrize("name", page.PAGES)
def test_every_page_has_a_place_for_figures(name: str, results: dict[str, Any]) -> None:
    text = (ROOT / name).read_text()
    filled = page.filled(text, page.texts(results))
    assert filled != text
    assert page.filled(filled, page.texts(results)) == filled


def test_a_layers_operations_are_counted_by_what_it_sums() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 10))
    forward = 2 * (36 * 8 * 27), 2 * (10 * 288)
    assert peak.flops_per_image(plain, (3, 8, 8)) == 3 * sum(forward) - forward[0]
    grouped = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8))
    assert peak.flops_per_image(grouped, (8, 8, 8)) == 2 * 2 * (36 * 8 * 9)
    assert torch.is_grad_enabled()
