"""What a training says while it runs: how long it takes to where it is to stop, and how many ranks there are."""

from pathlib import Path

import pytest

from pipeline import console
from pipeline.console import Progress
from pipeline.tracking.journal import RANKS, Journal


@pytest.mark.parametrize(("until", "left"), [(None, "00:03:10 left"), (50, "00:00:40 left"), (10, "00:00:00 left")])
def test_what_is_left_ends_where_it_is_to_stop(
    until: int | None, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PLAIN_EVERY_SECONDS", -1)
    journal = Journal(tmp_path / "journal.jsonl")
    journal.event("started", tags={})
    with Progress(tmp_path / "journal.jsonl", 200, 100, until) as progress:
        values = {"train/loss": 1.0, "train/accuracy": 0.5, "train/samples": 1000.0, "train/images_per_second": 100.0}
        journal.metrics(values, 10)
        progress.tick()
    assert capsys.readouterr().err.strip() == f"epoch 1/2  step 10/200  loss 1.0000  accuracy 0.500  100/s  {left}"


def test_it_says_how_many_ranks_there_are_from_which_step_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.event("started", tags={})
    with Progress(tmp_path / "journal.jsonl", 200, 100) as progress:
        for ranks, step, anew in ((2, 0, True), (1, 31, False), (2, 20, True)):
            journal.event(RANKS, step=step, ranks=ranks, anew=anew)
        progress.tick()
    assert capsys.readouterr().err.splitlines() == [
        "2 ranks from step 0 on",
        "1 rank from step 31 on",
        "no rank has the weights any more; 2 ranks from step 20 on",
    ]
