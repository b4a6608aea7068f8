"""Plots with names of classes that matplotlib could take for formulas."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from pipeline.data import Split
from pipeline.report import plots


@pytest.mark.parametrize("name", ["$5_$10", "$x^2$", "a\\$b", "$\\frac$"])
def test_a_name_with_dollars_is_drawn_as_it_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, list[str]] = {}
    save = plots._save

    def keep(figure: Figure, path: Path) -> None:
        save(figure, path)
        texts = [text for text in figure.findobj(Text) if text.get_visible()]
        assert not any(text.get_parse_math() for text in texts if "$" in text.get_text())
        drawn[path.name] = [text.get_text() for text in texts]

    monkeypatch.setattr(plots, "_save", keep)
    names = [name, "other"]
    plots.confusion([[3, 1], [0, 4]], names, tmp_path)
    plots.class_accuracy(dict(zip(names, (0.75, 1.0), strict=True)), tmp_path)
    plots.worst([[0.0, 0.9, 2.0], [1.0, 0.8, 1.0]], Split(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 0])), names, tmp_path)
    assert drawn["confusion.png"].count(name) == 2
    assert drawn["classes.png"].count(name) == 1
    assert {f"{name}\n{name}, 90%", f"{name}\nother, 80%"} <= {*drawn["worst.png"]}
