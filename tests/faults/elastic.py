"""A campaign of lost and gained ranks: `python -m tests.faults.elastic --seed 1 --events 500`.

The ranks of one elastic training are killed, alone and together, while a group forms and while they start, and the training is
stopped and goes on; it must end in the weights and figures of the same training left alone, and nobody is restarted who was not hurt.
"""

import argparse
import contextlib
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pipeline.heartbeat import read
from tests.kit.experiment import Experiment
from tests.kit.trainings import mlflow_runs, ranks_of, same_figures

# How often each is drawn: the loss of any rank, of the one that writes, of two, of all but one, of all; of one while the others form
# their group, and of one that has just been started again; a request to stop.
EVENTS = {"one": 6, "first": 4, "two": 3, "all but one": 2, "all": 1, "forming": 4, "newcomer": 4, "stop": 1}
# The longest pause between two events.
PAUSE_SECONDS = 1.5
LIMIT_SECONDS = 60
# With statistics that a step changes before its end, and random draws.
MODEL = """
from torch import nn

def build(channels: int, side: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, num_classes))
"""


@dataclass
class Campaign:
    """One training, what is done to it, and what went wrong."""

    experiment: Experiment
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)
    # From a loss to the next logged step, by what was lost.
    seconds: dict[str, list[float]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    process: Any = None
    # How often nobody was left who had the weights: the checkpoint has to do.
    anew: int = 0

    def start(self) -> None:
        self.process = self.experiment.start("train")

    def run(self, events: int) -> None:
        """Until so many events were done, or the training is over."""
        self.start()
        while self.done.total() < events and self.reached(self.step() + 1):
            time.sleep(self.rng.random() * PAUSE_SECONDS)
            if self.process.poll() is not None:
                break
            self.hurt(self.rng.choices([*EVENTS], [*EVENTS.values()])[0])
        said, _ = self.process.communicate(timeout=600)
        if self.process.returncode:
            self.violations.append(f"it ended with {self.process.returncode}: {said[-2000:]}")

    def step(self) -> int:
        """The newest step in the journal."""
        with contextlib.suppress(ValueError, IndexError):
            return self.experiment.journal("metrics")[-1]["step"]
        return 0

    def reached(self, step: int) -> bool:
        """Wait for a step; False once the training is over."""
        until = time.monotonic() + LIMIT_SECONDS
        while self.process.poll() is None and time.monotonic() < until:
            if self.step() >= step:
                return True
            time.sleep(0.005)
        if self.process.poll() is None:
            self.violations.append(f"step {step} was not reached in {LIMIT_SECONDS} s, after {dict(self.done)}")
            self.process.terminate()
        return False

    def ranks(self) -> dict[int, int]:
        """The pid of every rank that is in a group."""
        logs = sorted((self.experiment.run_folder / "logs").glob("*/*/attempt_0"))[-1]
        found = [snapshot for one in logs.iterdir() if one.name.isdigit() and (snapshot := read(one))]
        return {one.rank: one.pid for one in found if one.step >= 0 and psutil.pid_exists(one.pid)}

    def hurt(self, kind: str) -> None:
        """Do one event, and wait until the training has got over it."""
        ranks = self.ranks()
        if not ranks:
            return
        pids = [ranks[rank] for rank in sorted(ranks)]
        before, started_at = self.step(), time.monotonic()
        self.done[kind] += 1
        if kind == "stop":
            self.process.terminate()
            self.process.communicate(timeout=100)
            if self.process.returncode == 75:
                self.start()
            return
        drawn = self.rng.sample(pids, min(len(pids), 2))
        victims = {"first": pids[:1], "two": drawn, "all but one": pids[:-1] if self.rng.random() < 0.5 else pids[1:], "all": pids}
        lost = victims.get(kind, drawn[:1])
        self.kill(*lost)
        if kind == "forming" and len(drawn) > 1:
            time.sleep(self.rng.random() * 0.06)
            self.kill(drawn[1])
            lost = drawn
        if kind == "newcomer":
            time.sleep(self.rng.random() * 0.5)
            new = {one.pid for one in ranks_of(self.process)} - {*pids}
            self.kill(*new)
            lost = [*lost, *new]
        self.anew += {*pids} <= {*lost}
        if not self.reached(before + 2):
            return
        self.seconds.setdefault(kind, []).append(time.monotonic() - started_at)
        for pid in {*pids} - {*lost}:
            if not psutil.pid_exists(pid) and self.process.poll() is None:
                self.violations.append(f"{kind}: process {pid} was not hurt and is gone, after step {before}")

    def kill(self, *pids: int) -> None:
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()

    def check(self, baseline: Experiment) -> None:
        """The weights and figures of the training that was left alone; no step lost, but where nobody was left."""
        try:
            same_figures(self.experiment, baseline)
        except AssertionError as error:
            self.violations.append(f"other figures: {error}")
        if [run.info.status for run in mlflow_runs(self.experiment)] != ["FINISHED"]:
            self.violations.append("MLflow has another run than one that is finished")
        behind = [line["step"] for line in lost_steps(self.experiment)]
        if len(behind) > self.anew:
            self.violations.append(f"{len(behind)} times steps were lost, and only {self.anew} times nobody was left: {behind}")


def lost_steps(experiment: Experiment) -> list[dict[str, Any]]:
    """The lines of groups that began at an earlier step than was reached before."""
    reached, found = 0, []
    for line in experiment.journal("metrics", "ranks"):
        if line["kind"] == "ranks" and line["step"] < reached:
            found.append(line)
            # What is done again is not logged twice.
            reached = line["step"]
        elif line["kind"] == "ranks" or "train/loss" in line["values"]:
            reached = max(reached, line["step"])
    return found


def campaign(folder: Path, seed: int, events: int, ranks: int = 4, epochs: int = 4) -> Campaign:
    """Do a campaign in a folder."""
    shape: dict[str, Any] = {
        "data": {"name": "synthetic:6000"},
        "model__name": "mine.py:build",
        "train__epochs": epochs,
        "train__label_smoothing": 0.1,
    }
    shape |= {"checkpoint__every_steps": 20, "dist__world_size": ranks, "dist__lanes": 8, "tracking__log_every_steps": 1}
    shape |= {"dist__batch_size_per_gpu": 96 // ranks, "train__clip_norm": 1.0}
    made: list[Experiment] = []
    for name in ("alone", "hurt"):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine.py").write_text(MODEL)
        made.append(Experiment(folder / name).with_database().set(**shape, dist__elastic=name == "hurt"))
    made[0].run("prepare")
    shutil.copytree(folder / "alone" / "data", folder / "hurt" / "data")
    alone = made[0].start("train")
    found = Campaign(made[1], random.Random(seed))
    said, _ = alone.communicate(timeout=3600)
    assert alone.returncode == 0, said
    found.run(events)
    if not found.violations:
        found.check(made[0])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--epochs", type=int, help="of the training; by itself as many as there are events")
    wanted = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lockstep-elastic-"))
    found = campaign(folder, wanted.seed, wanted.events, epochs=wanted.epochs or max(6, wanted.events))
    print(f"seed {wanted.seed}: {found.done.total()} events {dict(found.done)}, {len(found.violations)} violations")
    for kind, seconds in found.seconds.items():
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}, n = {len(seconds)}"
        print(f"  {kind}: the second step after {statistics.median(seconds):.2f} s ({spread})")
    print(*found.violations, sep="\n")
    if found.done.total() < wanted.events:
        print(f"the training was over before {wanted.events} events; give it more --epochs")
    if not found.violations:
        shutil.rmtree(folder)
    return bool(found.violations) or found.done.total() < wanted.events


if __name__ == "__main__":
    sys.exit(main())
