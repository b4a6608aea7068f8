"""Runs that differ in seed and placement alone are one experiment; what experiments differ in, and how they fare."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from pipeline.compare.results import Point, Result, thinned

NOT_COMPARED = {"seed", "prepared data"}
DATA = ("data.", "source data")
CODE = ("source.", "versions.")


@dataclass(frozen=True)
class Spread:
    """A figure over seeds: mean, standard deviation where there are two seeds or more, and their number."""

    mean: float
    deviation: float | None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.deviation is None else f" ± {self.deviation:.4f}")


def spread(values: Iterable[float]) -> Spread | None:
    """Return the spread of some values, or None if there are none."""
    known = list(values)
    if not known:
        return None
    return Spread(mean(known), stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class Group:
    """All runs of one experiment."""

    letter: str
    results: list[Result]

    @property
    def seeds(self) -> list[int]:
        return sorted({result.seed for result in self.results})

    def over_seeds(self, name: str) -> Spread | None:
        """A figure of every seed; several runs of one seed count as their mean."""
        values: dict[int, list[float]] = {}
        for result in self.results:
            value = getattr(result, name)
            if value is not None:
                values.setdefault(result.seed, []).append(value)
        return spread(mean(of_seed) for of_seed in values.values())

    def by_ranks(self, name: str) -> dict[str, float]:
        """A figure of speed, as its mean for every number of ranks."""
        values: dict[str, list[float]] = {}
        for result in sorted(self.results, key=lambda one: one.ranks):
            value = getattr(result, name)
            if value is not None:
                values.setdefault(" then ".join(map(str, result.ranks)) or "?", []).append(value)
        return {ranks: mean(found) for ranks, found in values.items()}

    def curve(self, name: str) -> list[tuple[int, Spread, float, float]]:
        """Step, spread, lowest and highest value of a curve over seeds."""
        values: dict[int, dict[int, float]] = {}
        ends: dict[int, int] = {}
        for result in self.results:
            for point in result.curves[name]:
                if math.isfinite(point.value):
                    values.setdefault(point.step, {})[result.seed] = point.value
                    ends[result.seed] = max(point.step, ends.get(result.seed, 0))
        # Where a seed that comes so far has no value, the mean would jump to that of the others.
        whole = {step: of for step, of in sorted(values.items()) if all(seed in of or ends[seed] < step for seed in ends)}
        return thinned([(step, found, min(of.values()), max(of.values())) for step, of in whole.items() if (found := spread(of.values()))])

    def lines(self, name: str) -> list[tuple[Result, list[Point]]]:
        """The curve of every run by itself."""
        return [(result, thinned(result.curves[name])) for result in self.results]


def grouped(results: list[Result]) -> list[Group]:
    """Return the experiments, the one with the best validation accuracy first, and runs in the order of their seeds."""
    by_experiment: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda one: (one.seed, one.ranks, one.name)):
        by_experiment.setdefault(result.comparable, []).append(result)
    groups = [Group("", found) for found in by_experiment.values()]
    groups.sort(key=lambda group: -(best.mean if (best := group.over_seeds("accuracy")) else -1.0))
    return [Group(letter(number), group.results) for number, group in enumerate(groups)]


def letter(number: int) -> str:
    """A to Z, then A1 to Z1."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def differing(groups: list[Group]) -> dict[str, list[Any]]:
    """Return the settings that are not the same in all experiments, with the value of each; code comes last."""
    each = [group.results[0].settings for group in groups]
    names = {name for settings in each for name in settings} - NOT_COMPARED
    found = {name: [settings.get(name) for settings in each] for name in sorted(names, key=lambda name: (name.startswith(CODE), name))}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def shared(groups: list[Group]) -> dict[str, Any]:
    """Return the settings that are the same in all experiments."""
    others = differing(groups).keys() | NOT_COMPARED
    return {name: value for name, value in groups[0].results[0].settings.items() if name not in others}


def same_seed_results(results: list[Result]) -> list[list[Result]]:
    """Return the finished runs that must have the same bits, where there are several: those of one fingerprint."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if result.finished:
            found.setdefault(result.fingerprint, []).append(result)
    return [several for several in found.values() if len(several) > 1]
