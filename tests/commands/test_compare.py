"""Compare for real: five seeds on two world sizes are one experiment; the page is read in a browser."""

import json
import re
import shutil
from html import escape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline import compare
from pipeline.compare.results import journaled_curves
from pipeline.config import Config, ConfigError, DataError
from pipeline.files import Paths
from pipeline.tracking.journal import Journal
from tests.kit import browser
from tests.kit.experiment import Experiment
from tests.kit.finished import finish, pretend

SEEDS = range(1, 6)
# A phone's screen.
NARROW = 390
MEASURED = """<!doctype html><iframe style="border:0" width="{width}" height="900" srcdoc="{page}"
onload="let all = this.contentDocument.documentElement; document.title = `${{all.clientWidth}} ${{all.scrollWidth}}`"></iframe>"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five seeds, on one rank and on two, in a folder each."""
    folder = tmp_path_factory.mktemp("trained")
    for world_size in (1, 2):
        (folder / str(world_size)).mkdir()
        experiment = Experiment(folder / str(world_size)).with_database()
        for seed in SEEDS:
            placement = {"dist__world_size": world_size, "dist__batch_size_per_gpu": 96 // world_size}
            experiment.set(seed=seed, data__name="synthetic:600", model__name="mlp", train__epochs=1, **placement)
            experiment.run("prepare")
            experiment.run("train")
    return folder


@pytest.mark.slow
def test_seeds_are_grouped_and_world_sizes_are_the_same_experiment(trained: Path) -> None:
    experiment = Experiment(trained / "1")
    said = experiment.run("compare", str(trained / "1" / "runs"), str(trained / "2" / "runs"))
    _, row, *_ = said.splitlines()
    assert re.match(r"A  1-5    1, 2   0\.\d{4} ± 0\.\d{4} ", row), said
    assert "Differs: seed and number of ranks alone" in said
    assert "Same bits: yes: 5 fingerprints were trained more than once, on 1 and 2 ranks, and each has one SHA-256" in said
    page = (trained / "1" / "compare.html").read_text()
    assert "<h1>10 runs of 1 experiment</h1>" in page
    for seed in SEEDS:
        assert len(re.findall(rf"<td>{seed}</td><td>[12]</td><td>done</td>", page)) == 2


@pytest.mark.slow
@browser.needs_browser
def test_the_page_is_read_in_a_browser_on_a_phone_and_at_night(trained: Path, tmp_path: Path) -> None:
    source = tmp_path / "compare.html"
    assert compare.run(Config(), Paths(trained / "1" / "params.yaml"), [trained / "1" / "runs"], source) == 0
    (tmp_path / "measured.html").write_text(MEASURED.format(width=NARROW, page=escape(source.read_text())))
    measured = browser.content(f"file://{tmp_path / 'measured.html'}", "<head><title>")
    width, content = re.findall(r"\d+", re.findall("<title>(.*?)</title>", measured)[0])
    # Nothing is wider than the screen; a scrollbar is 15 pixels of it.
    assert NARROW - 20 < int(content) == int(width)
    pictures = [browser.picture(f"file://{source}", tmp_path / f"{dark}.png", NARROW, 800, dark=dark) for dark in (False, True)]
    bright, night = (np.asarray(Image.open(path).convert("L")) for path in pictures)
    # Paper and ink have changed places.
    assert np.median(bright) > 200
    assert np.median(night) < 60
    # Curves are drawn in colour.
    assert np.asarray(Image.open(pictures[0]).convert("HSV"))[..., 1].max() > 150


def test_a_damaged_run_is_named_and_the_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    first = finish(tmp_path / "first")
    second = finish(tmp_path / "second", train__learning_rate=0.2)
    shutil.copytree(second, tmp_path / "first" / "runs" / second.name)
    paths = Paths(tmp_path / "first" / "params.yaml")
    # The same run once more, as what was published of it.
    assert compare.run(Config(), paths, [tmp_path / "first" / "runs", tmp_path / "first" / "models"], None) == 0
    assert "Differs: train.learning_rate" in capsys.readouterr().out
    assert "<h1>2 runs of 2 experiments</h1>" in (tmp_path / "first" / "compare.html").read_text()
    receipt = first / "receipt.json"
    receipt.write_text(receipt.read_text()[:-20])
    assert compare.run(Config(), paths, [], None) == DataError.exit_code
    out, err = capsys.readouterr()
    assert f"{receipt}: is damaged" in err
    assert "Best: A" in out
    with pytest.raises(DataError, match="is damaged"):
        compare.run(Config(), paths, [first], None)


def test_a_run_that_lacks_what_is_compared_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    run, paths = finish(tmp_path), Paths(tmp_path / "params.yaml")
    for number, lacks in enumerate(({}, {"seed": 1, "dist": {}}, {"seed": 1, "dist": 3})):
        other = run.with_name(str(number))
        shutil.copytree(run, other)
        (other / "receipt.json").unlink()
        (other / "identity.json").write_text(json.dumps(lacks))
    assert compare.run(Config(), paths, [], None) == DataError.exit_code
    out, err = capsys.readouterr()
    assert err.count(": its identity lacks the seed or the global batch; move it away") == 3
    assert f"Again: python -m pipeline verify --params {paths.params} " in out


def test_a_run_that_was_resumed_from_another_has_no_negative_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.event("run", id="one", experiment="lockstep", name="one", params={}, tags={})
    journal.event("metrics", step=1, values={"train/loss": 2.0}, at=1_000_000)
    journal.event("metrics", step=2, values={"train/loss": 1.0}, at=4_600_000)
    journal.close()
    curve = journaled_curves(tmp_path / "journal.jsonl")["train/loss"]
    assert [point.hours for point in curve] == [0.0, 1.0]


def test_no_run_is_one_line(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "params.yaml")
    with pytest.raises(ConfigError, match="nothing: no such file or folder"):
        compare.run(Config(), paths, [tmp_path / "nothing"], None)
    with pytest.raises(ConfigError, match="no run is there; run: python -m pipeline train"):
        compare.run(Config(), paths, [], None)


def test_an_unfinished_run_is_compared_by_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch)
    run = finish(tmp_path, done=False)
    assert compare.run(Config(), Paths(tmp_path / "params.yaml"), [run], None) == 0
    said = capsys.readouterr().out
    assert f"not finished: {run.name}" in said
    assert "Again: nothing is finished" in said
    assert "0.7500" in said
