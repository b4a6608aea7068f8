"""Which experiment is best, whether that is fair, and whether seeds alone may explain it."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.compare.answers import again, answers, best, differs, same_bits, unfair
from pipeline.compare.drawing import Axis, Line, chart
from pipeline.compare.groups import Spread, grouped
from pipeline.compare.page import page
from pipeline.compare.results import Point, Result, thinned
from pipeline.compare.table import counts, duration, experiments

PARAMS = Path("other/params.yaml")
SETTINGS = {
    "seed": 1,
    "prepared data": "a" * 64,
    "source data": "b" * 64,
    "train.learning_rate": 0.1,
    "dist.global_batch": 96,
    "source.loop": "c" * 16,
}


def result(learning_rate: float, seed: int, accuracy: float | None, ranks: int = 1, **changes) -> Result:
    name = f"{learning_rate}-{seed}"
    curve = [] if accuracy is None else [Point(11, 0.1, accuracy / 2), Point(22, 0.2, accuracy)]
    made = Result(
        name=f"runs/{name}",
        journal=f"{name} on {ranks}",
        fingerprint=name,
        comparable=str(learning_rate),
        settings=SETTINGS | {"seed": seed, "prepared data": str(seed), "train.learning_rate": learning_rate},
        seed=seed,
        ranks=[ranks],
        outcome="done",
        step=22,
        accuracy=accuracy,
        test_accuracy=accuracy,
        images_per_second=1000.0 * ranks,
        hours=0.2,
        weights_sha256="d" * 64,
        dirty=False,
        curves={"train/loss": [], "validation/loss": [], "validation/accuracy": curve},
    )
    return replace(made, **changes)


def test_runs_of_several_seeds_and_ranks_are_one_experiment() -> None:
    runs = [result(0.1, seed, 0.8 + seed / 100, ranks) for seed in range(1, 6) for ranks in (2, 1)]
    (group,) = grouped(runs)
    assert (group.letter, group.seeds, len(group.results)) == ("A", [1, 2, 3, 4, 5], 10)
    # Five values, each twice: the second world size makes the spread no smaller.
    spread = group.over_seeds("accuracy")
    assert spread == Spread(pytest.approx(0.83), pytest.approx(0.0158114), 5)
    header, (row,) = experiments([group])
    assert dict(zip(header, row, strict=True)) == {
        "": "A",
        "seeds": "1-5",
        "ranks": "1, 2",
        "validation accuracy": "0.8300 ± 0.0158",
        "test accuracy": "0.8300 ± 0.0158",
        "images/s": "1,000 on 1, 2,000 on 2",
        "time": "12.0 min on 1, 12.0 min on 2",
    }
    assert differs([group]) == "seed and number of ranks alone"
    assert unfair([group]) == []
    assert same_bits([group]).startswith("yes: 5 fingerprints were trained more than once, on 1 and 2 ranks")


def test_another_digest_of_the_same_fingerprint_is_told() -> None:
    runs = [result(0.1, 1, 0.8), result(0.1, 1, 0.8, 2, weights_sha256="e" * 64)]
    assert same_bits(grouped(runs)) == "NO: several digests of 0.1-1, though nothing that should change a bit is another one"
    assert same_bits(grouped(runs[:1])) == "each was trained once; python -m pipeline verify computes one again"


def test_the_best_is_told_with_what_its_lead_is_worth() -> None:
    def told(first: list[float], second: list[float]) -> str:
        rows = [(0.1, first), (0.2, second)]
        return best(grouped([result(rate, seed, value) for rate, values in rows for seed, value in enumerate(values)]))

    assert told([0.8], [0.9]) == (
        "A, validation accuracy 0.9000, test accuracy 0.9000; ahead of B by 0.1000, from one seed: how much of it is chance is unknown"
    )
    clear = told([0.80, 0.81, 0.79], [0.90, 0.91, 0.89])
    assert clear.startswith("A, validation accuracy 0.9000 ± 0.0100, test accuracy 0.9000 ± 0.0100; ahead of B by 0.1000 ± 0.0082")
    assert "explain" not in clear
    assert told([0.80, 0.90, 0.70], [0.81, 0.91, 0.71]).endswith(
        "ahead of B by 0.0100 ± 0.0816 (standard error), which the seeds alone may explain"
    )
    assert best(grouped([result(0.1, 1, None)])) == "unknown: no run has come to the end of an epoch"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": SETTINGS | {"source data": "f" * 64}}, "the data are not the same (source data)"),
        ({"settings": SETTINGS | {"source.loop": "f" * 16}}, "the code is not the same"),
        ({"step": 44}, "not trained on as many images: A 2,112, B 4,224"),
        ({"seed": 2}, "not of the same seeds"),
        ({"weights_sha256": None, "fingerprint": "0123"}, "not finished: 0123"),
        ({"dirty": True}, "1 trained by code that is in no commit"),
    ],
)
def test_what_makes_a_comparison_unfair_is_named(changes: dict, reason: str) -> None:
    first, second = result(0.1, 1, 0.9), result(0.2, 1, 0.8)
    assert unfair(grouped([first, second])) == []
    assert unfair(grouped([first, replace(second, **changes)])) == [reason]


def test_settings_that_differ_are_columns() -> None:
    header, rows = experiments(grouped([result(0.1, 1, 0.9), result(0.25, 1, 0.8)]))
    assert [row[header.index("train.learning_rate")] for row in rows] == ["0.1", "0.25"]


def test_the_page_needs_nothing_else_and_keeps_what_it_is_told_from_becoming_markup() -> None:
    runs = [result(rate, seed, 0.9, name=f"runs/<b>{seed}") for rate in (0.1, 0.2) for seed in (1, 2)]
    html = page(grouped(runs), PARAMS)
    assert not any(word in html for word in ("http", "src=", "<script", "<link", "@import", "<b>"))
    assert "runs/&lt;b&gt;1" in html
    assert html.count("<svg") == 2
    assert html.count('class="band"') == 2
    assert dict(answers(grouped(runs), PARAMS))["Best"] in html


def test_an_axis_has_round_numbers_around_all_values() -> None:
    for low, high in ((0.5, 0.93), (0, 31680), (2.3, 2.3), (0, 0), (-1.7, 12), (0.90001, 0.90003)):
        axis = Axis.over(low, high, 0, 100)
        assert axis.low <= low <= high <= axis.high
        assert axis.low < axis.high
        assert 2 <= len(axis.ticks) <= 8
        assert (axis.at(axis.low), axis.at(axis.high)) == (0, 100)


def test_a_chart_of_nothing_says_so_and_one_point_is_seen() -> None:
    assert chart("loss", "x", "y", []) == "<p>loss: nothing to draw.</p>"
    assert "h.1" in chart("loss", "x", "y", [Line("A", 0, [(1.0, 1.0)])])


def test_the_mean_of_seeds_is_over_all_that_come_so_far() -> None:
    long, short = ({"train/loss": [Point(step, None, value) for step in range(1, last + 1)]} for value, last in ((1.0, 900), (2.0, 700)))
    (group,) = grouped([result(0.1, 1, 0.9, curves=long), result(0.1, 2, 0.8, curves=short)])
    found = group.curve("train/loss")
    assert len(found) <= 401
    assert {spread.mean for step, spread, _, _ in found if step <= 700} == {1.5}
    assert {spread.mean for step, spread, _, _ in found if step > 700} == {1.0}
    # One that logs another distance has no say where it has no value, nor makes the mean jump.
    seldom = {"train/loss": [Point(step, None, 2.0) for step in range(2, 901, 2)]}
    (group,) = grouped([result(0.1, 1, 0.9, curves=long), result(0.1, 2, 0.8, curves=seldom)])
    assert {spread.mean for _, spread, _, _ in group.curve("train/loss")} == {1.5}


def test_the_best_that_is_finished_can_be_had_again() -> None:
    runs = [result(0.1, 1, 0.9, weights_sha256=None), result(0.2, 1, 0.8, name="runs/it's"), result(0.2, 2, 0.7)]
    assert again(grouped(runs), Path("params.yaml")) == """python -m pipeline verify 'runs/it'"'"'s'"""
    assert again(grouped(runs[2:]), PARAMS) == "python -m pipeline verify --params other/params.yaml runs/0.2-2"
    assert again(grouped(runs[:1]), PARAMS) == "nothing is finished"


def test_a_long_curve_keeps_its_ends() -> None:
    points = [Point(step, None, 0.0) for step in range(10001)]
    few = thinned(points)
    assert len(few) <= 401
    assert (few[0], few[-1]) == (points[0], points[-1])


def test_numbers_are_told_as_people_would() -> None:
    assert counts([1, 2, 3]) == "1-3"
    assert counts([1, 2]) == "1, 2"
    assert counts([1, 3, 4]) == "1, 3, 4"
    assert [duration(hours) for hours in (None, 0.01, 0.5, 3)] == ["-", "36.0 s", "30.0 min", "3.0 h"]
