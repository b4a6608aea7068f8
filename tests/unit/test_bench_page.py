"""The figures that a bench writes into README.md and docs/performance.md."""

import json
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
    return {"machine": "a CPU", "cpus": 2, "torch": "2", "models": models}


def test_a_page_has_every_arm_and_the_readme_says_which_precision_is_compared(results: dict[str, Any]) -> None:
    texts = page.texts(results)
    assert "LeNet 3.18 in bf16 and 1.59 in fp32; ResNet-18" in texts["speed"]
    for arm in results["models"]["lenet"]["images_per_second"]:
        assert f"\n| {arm} | " in texts["against"]
    marked = "before\n<!-- speed: by hand -->\nold\n<!-- end of speed -->\nafter\n"
    assert page.filled(marked, texts) == f"before\n<!-- speed: by hand -->\n{texts['speed']}\n<!-- end of speed -->\nafter\n"


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
