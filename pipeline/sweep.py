"""The sweep command: successive halving. All candidates train for a few epochs, the better half goes on, the last one to the end.

A rung is a stop, and going on is exact: the winner has the bits of a training that nothing interrupted. What was done is in the
runs themselves, so the same command goes on after a stop or a kill, and decides alike.
"""

import itertools
import json
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline import models, parallel, sync, train
from pipeline.config import Config, ConfigError
from pipeline.config.params import load
from pipeline.files import Paths
from pipeline.plan import Plan, plan
from pipeline.runs.status import STOPPED
from pipeline.stop_signals import deferred
from pipeline.tracking import journal as journals

DIVERGED = 5


@dataclass(frozen=True)
class Candidate:
    """One combination of values."""

    # KEY=VALUE each.
    pairs: list[str]
    config: Config
    plan: Plan

    @property
    def name(self) -> str:
        return " ".join(self.pairs)

    @property
    def diverged(self) -> bool:
        return journals.last(self.plan.job.journal, "started", "ended").get("outcome") == "diverged"

    def at(self, epoch: int) -> bool:
        """Return True if it has come so far; the end is where it was published."""
        until = epoch * self.plan.steps_per_epoch
        return self.plan.done or (until < self.plan.steps and self.plan.has_reached(until))

    def accuracy(self, epoch: int) -> float:
        """The best validation accuracy up to an epoch, whatever came after it; -1 if it diverged before."""
        until = epoch * self.plan.steps_per_epoch
        steps = journals.metrics_by_step(self.plan.job.journal)
        found = {step: values["validation/accuracy"] for step, values in steps.items() if step <= until and "validation/accuracy" in values}
        return max(found.values()) if until in found else -1.0


def run(_: Config, paths: Paths, values: list[str], factor: int) -> int:
    """Train the candidates in rungs, publish the winner; returns the exit code."""
    candidates = candidates_of(values, paths)
    epochs, command = candidates[0].config.train.epochs, shlex.join(command_of(paths, values, factor))
    alive, table = candidates, {candidate.name: list[str]() for candidate in candidates}
    for epoch, kept in rungs(len(candidates), epochs, factor):
        say(f"{len(alive)} candidate{'s' * (len(alive) > 1)} to epoch {epoch} of {epochs}")
        for candidate in alive:
            code = reach(candidate, epoch, paths, command)
            if code:
                return code
            table[candidate.name].append(figure(candidate.accuracy(epoch)))
        # Of equals the one that was named first.
        alive = sorted(alive, key=lambda one: -one.accuracy(epoch))[:kept]
        if alive[0].accuracy(epoch) < 0:
            send_rest(candidates, paths)
            say("every candidate diverged; lower the learning rate")
            return DIVERGED
    say(f"{alive[0].name} to the end")
    code = train.run(alive[0].config, paths, command=command)
    if code == 0:
        send_rest(candidates, paths)
        report(candidates, alive[0], table)
    return code


def command_of(paths: Paths, values: list[str], factor: int) -> list[str]:
    """What goes on with this sweep."""
    return ["python", "-m", "pipeline", "sweep", "--params", str(paths.params), "--factor", str(factor), *values]


def candidates_of(values: list[str], paths: Paths) -> list[Candidate]:
    """Every combination of the values, each checked before any is trained."""
    axes: dict[str, list[tuple[str, Any]]] = {}
    for one in values:
        key, sign, text = one.partition("=")
        if not (key and sign and text):
            raise ConfigError(f"sweep: {one!r}: expected KEY=VALUE,VALUE such as train.learning_rate=0.01,0.1")
        if key in ("seed", "train.epochs") or key.startswith("data."):
            raise ConfigError(f"sweep: {key}: candidates are compared on the same data and as many epochs; sweep another key")
        if key in axes:
            raise ConfigError(f"sweep: {key} is named twice; name all its values in one: {key}=VALUE,VALUE")
        axes[key] = values_of(key, text)
    found: list[Candidate] = []
    names: dict[Path, str] = {}
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        config = load(paths.params, {key: value for key, (_, value) in chosen.items()})
        models.check(config.model.name)
        models.check_frozen(config.model.frozen, config.dist.strategy)
        parallel.check(config.dist)
        config = config.model_copy(update={"model": models.with_source(config.model, paths.root)})
        one = Candidate([f"{key}={text}" for key, (text, _) in chosen.items()], config, plan(config, paths))
        found.append(one)
        if (other := names.setdefault(one.plan.job.run, one.name)) != one.name or len(names) < len(found):
            raise ConfigError(f"sweep: {other} and {one.name} are the same experiment; remove one of them")
    if len(names) < 2:
        raise ConfigError(f"sweep: {values[0]}: is one candidate; name two or more values, such as train.learning_rate=0.01,0.1")
    return found


def values_of(key: str, text: str) -> list[tuple[str, Any]]:
    """The values of a key as they are written, and as YAML reads them; a value may be a list."""
    try:
        found: list[Any] = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        raise ConfigError(f"sweep: {key}={text}: is not YAML; write for example train.learning_rate=0.01,0.1") from None
    written = [one.strip() for one in text.split(",")]
    return list(zip(written if len(written) == len(found) else map(json.dumps, found), found, strict=True))


def rungs(count: int, epochs: int, factor: int) -> list[tuple[int, int]]:
    """Return behind which epoch how many candidates are kept, one in the end; each rung is shorter than the next by the factor."""
    halvings = math.ceil(math.log(count, factor) - 1e-9)
    found: dict[int, int] = {}
    kept = count
    for left in range(halvings, 0, -1):
        kept = max(1, math.ceil(kept / factor)) if left > 1 else 1
        # Where there are too few epochs, rungs fall together.
        found[min(epochs, math.ceil(epochs / factor**left))] = kept
    return list(found.items())


def reach(candidate: Candidate, epoch: int, paths: Paths, command: str) -> int:
    """Train a candidate up to an epoch; 0 if it has come there, or diverged on the way."""
    if candidate.diverged or candidate.at(epoch):
        return 0
    say(candidate.name)
    code = train.run(candidate.config, paths, stop_after_epochs=epoch, command=command)
    return 0 if code == DIVERGED or (code == STOPPED and candidate.at(epoch)) else code


def send_rest(candidates: list[Candidate], paths: Paths) -> None:
    """Let MLflow have candidates that an earlier start reached, where whoever stopped that did not wait for MLflow."""
    with deferred() as hurried:
        if not sync.send([one.plan.job.run for one in candidates], paths, hurried):
            say(f"MLflow does not have all candidates yet. To catch up: python -m pipeline sync --params {shlex.quote(str(paths.params))}")


def report(candidates: list[Candidate], winner: Candidate, table: dict[str, list[str]]) -> None:
    """Say what came of all, what it cost, and how to keep the winner."""
    width = max(map(len, table))
    for name, accuracies in table.items():
        say(f"{name:<{width}}  {'  '.join(accuracies)}")
    done = sum(journals.reached(candidate.plan.job.journal, evaluated=False) for candidate in candidates)
    whole = sum(candidate.plan.steps for candidate in candidates)
    say(f"{winner.name} won and is in {winner.plan.job.run}; {done:,} steps were trained, where all candidates to the end are {whole:,}")
    say(f"to make it the experiment: {shlex.join(['dvc', 'exp', 'run', *(word for pair in winner.pairs for word in ('-S', pair))])}")


def figure(accuracy: float) -> str:
    return "diverged" if accuracy < 0 else f"{accuracy:.4f}"


def say(text: str) -> None:
    print(f"sweep: {text}", file=sys.stderr)
