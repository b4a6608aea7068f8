"""Curves and tables: as CSV for `dvc plots`, as PNG for people."""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.data import Split
from pipeline.tracking.journal import metrics_by_step

TRAINING = ("train/loss", "train/accuracy", "train/top5_accuracy", "train/learning_rate")
# Rows and columns of the images that were predicted worst.
WORST = (4, 6)
# More are not told apart by colours.
LEGEND_RANKS = 10
CURVES = (*TRAINING, "validation/loss", "validation/accuracy", "validation/top5_accuracy")


def curves(journal: Path, folder: Path) -> None:
    """Write `curves.csv` and `curves.png`: loss, accuracy and learning rate over the steps."""
    steps = [(step, values) for step, values in metrics_by_step(journal).items() if not values.keys().isdisjoint(CURVES)]
    header = [name.replace("/", "_") for name in CURVES]
    _write_csv(folder / "curves.csv", ["step", *header], ([step, *(values.get(name, "") for name in CURVES)] for step, values in steps))
    figure, (left, right) = _figure(1, 2, (11, 4))
    for axes, kind in ((left, "loss"), (right, "accuracy")):
        for part in ("train", "validation"):
            points = [(step, values[f"{part}/{kind}"]) for step, values in steps if f"{part}/{kind}" in values]
            axes.plot(*zip(*points, strict=True), label=part, marker="o" if part == "validation" else None, markersize=4)
        axes.set(xlabel="step", ylabel=kind)
        axes.grid(alpha=0.3)
        axes.legend()
    _save(figure, folder / "curves.png")


def step_times(journal: Path, folder: Path) -> str:
    """Write `ranks.png`: how long each rank computed a step, without its waiting for others; returns that in words, or nothing on GPUs."""
    times: dict[int, list[tuple[int, float]]] = {}
    for step, values in metrics_by_step(journal).items():
        for name, value in values.items():
            if found := re.fullmatch(r"system/rank_(\d+)_step_milliseconds", name):
                times.setdefault(int(found[1]), []).append((step, value))
    if not times:
        return ""
    figure, axes = _figure(1, 1, (7, 4))
    for rank, points in sorted(times.items()):
        axes.plot(*zip(*points, strict=True), label=f"rank {rank}", linewidth=1)
    axes.set(xlabel="step", ylabel="ms a step, without waiting", ylim=(0, None))
    axes.grid(alpha=0.3)
    if len(times) <= LEGEND_RANKS:
        axes.legend()
    _save(figure, folder / "ranks.png")
    medians = {rank: median(value for _, value in points) for rank, points in times.items()}
    fastest, slowest = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    if fastest == slowest:
        return f"{medians[slowest]:.1f} ms"
    return f"{medians[fastest]:.1f} ms on rank {fastest} to {medians[slowest]:.1f} ms on rank {slowest}"


def confusion(counts: list[list[int]], names: list[str], folder: Path) -> None:
    """Write `confusion.csv`, with a row for every pair of true and predicted class, and `confusion.png`."""
    pairs = ([names[true], names[predicted], count] for true, row in enumerate(counts) for predicted, count in enumerate(row))
    _write_csv(folder / "confusion.csv", ["actual", "predicted", "count"], pairs)
    figure, axes = _figure(1, 1, (7, 6))
    axes.imshow(counts, cmap="Blues")
    axes.set(xlabel="predicted", ylabel="actual")
    if len(names) <= 20:
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
        highest = max(max(row) for row in counts)
        for true, row in enumerate(counts):
            for predicted, count in enumerate(row):
                axes.text(
                    predicted, true, str(count), ha="center", va="center", color="white" if count > highest / 2 else "black", fontsize=8
                )
    _save(figure, folder / "confusion.png")


def class_accuracy(values: dict[str, float], folder: Path) -> None:
    """Write `classes.csv` and `classes.png`: the accuracy of every class."""
    _write_csv(folder / "classes.csv", ["class", "accuracy"], values.items())
    figure, axes = _figure(1, 1, (7, 4))
    axes.barh(range(len(values)), list(values.values()))
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.set(xlabel="accuracy", xlim=(0, 1))
    _save(figure, folder / "classes.png")


def predictions(rows: list[list[float]], labels: list[int], names: list[str], folder: Path) -> None:
    """Write `predictions.csv`: what every image is, what was predicted for it, how probable that was, and the loss."""
    told = ([index, names[label], names[int(row[0])], row[1], row[2]] for index, (row, label) in enumerate(zip(rows, labels, strict=True)))
    _write_csv(folder / "predictions.csv", ["image", "actual", "predicted", "probability", "loss"], told)


def worst(rows: list[list[float]], split: Split, names: list[str], folder: Path) -> None:
    """Write `worst.png`: the images with the highest losses, each with what it is and what was predicted."""
    order = sorted(range(len(rows)), key=lambda index: -rows[index][2])[: WORST[0] * WORST[1]]
    figure, grid = _figure(*WORST, (10, 8))
    figure.suptitle("Highest losses: what it is, then what was predicted", fontsize=10)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, index in zip(grid.flat, order, strict=False):
        pixels = split.images[index].transpose(1, 2, 0)
        axes.imshow(pixels if pixels.shape[2] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=255)
        predicted, probability = names[int(rows[index][0])], rows[index][1]
        axes.set_title(f"{names[split.labels[index]]}\n{predicted}, {probability:.0%}", fontsize=8)
    _save(figure, folder / "worst.png")


def _write_csv(path: Path, header: list[str], rows: Iterable[Iterable[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    # Names of classes may have dollars, and are no formulas.
    matplotlib.rcParams["text.parse_math"] = False
    return pyplot.subplots(rows, columns, figsize=size, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    # Without the date and the version in it, equal plots are equal files.
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
