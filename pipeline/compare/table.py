"""The comparison as text: a table of experiments, a table of runs."""

from collections.abc import Callable
from typing import Any

from pipeline.compare.groups import CODE, Group, differing
from pipeline.compare.results import Result

Table = tuple[list[str], list[list[str]]]


def shown(value: Any) -> str:
    """A value as params.yaml has it; a digest by its first digits."""
    text = "null" if value is None else str(value)
    return text[:8] if len(text) in (16, 64) and not set(text) - set("0123456789abcdef") else text


def share(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{accuracy:.4f}"


def counts(numbers: list[int]) -> str:
    """1-5 for five numbers in a row, else each."""
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def duration(hours: float | None) -> str:
    """In the unit that has a figure before the point."""
    if hours is None:
        return "-"
    return f"{hours:.1f} h" if hours >= 2 else f"{hours * 60:.1f} min" if hours >= 2 / 60 else f"{hours * 3600:.1f} s"


def rate(images_per_second: float | None) -> str:
    return "-" if images_per_second is None else f"{images_per_second:,.0f}"


def by_ranks(values: dict[str, float], written: Callable[[float | None], str]) -> str:
    """The one value, or each with its number of ranks."""
    if len(values) < 2:
        return written(next(iter(values.values()), None))
    return ", ".join(f"{written(value)} on {ranks}" for ranks, value in values.items())


def experiments(groups: list[Group]) -> Table:
    """One row an experiment: what is its own, and how it fares."""
    own = {name: values for name, values in differing(groups).items() if not name.startswith(CODE)}
    header = ["", *own, "seeds", "ranks", "validation accuracy", "test accuracy", "images/s", "time"]
    rows = [
        [
            group.letter,
            *(shown(values[number]) for values in own.values()),
            counts(group.seeds),
            counts(sorted({size for result in group.results for size in result.ranks})) or "-",
            str(group.over_seeds("accuracy") or "-"),
            str(group.over_seeds("test_accuracy") or "-"),
            by_ranks(group.by_ranks("images_per_second"), rate),
            by_ranks(group.by_ranks("hours"), duration),
        ]
        for number, group in enumerate(groups)
    ]
    return header, rows


def runs(groups: list[Group]) -> Table:
    """One row a run."""
    header = ["", "run", "seed", "ranks", "outcome", "step", "validation accuracy", "test accuracy", "images/s", "time", "weights"]
    rows = [[group.letter, result.name, *figures(result)] for group in groups for result in group.results]
    return header, rows


def figures(result: Result) -> list[str]:
    """What a run came to."""
    return [
        str(result.seed),
        " then ".join(map(str, result.ranks)) or "-",
        result.outcome,
        str(result.step),
        share(result.accuracy),
        share(result.test_accuracy),
        rate(result.images_per_second),
        duration(result.hours),
        (result.weights_sha256 or "-")[:12],
    ]


def as_text(table: Table) -> str:
    """Columns under their names."""
    header, rows = table
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows))
