"""A campaign of random faults: `python -m tests.faults.chaos --seed 1 --faults 100`.

Small experiments are killed, stopped, left without disk and damaged, started again on other world sizes until they are done, and
compared with the same experiments left alone. What is done follows from the seed; when exactly, down to the step, does not, as
real machines differ in their timings. `--only N` repeats one experiment of a campaign; Ctrl-C ends it early, with its summary.
"""

import argparse
import itertools
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.tracking.journal import last
from tests.faults import chaos_checks as checks
from tests.faults.chaos_experiments import EXPERIMENTS, disk, may_mount, pipeline, reference, write_params
from tests.faults.chaos_faults import AFTER_THE_END, Fault, Start, hurt, step_of
from tests.faults.chaos_plans import plan_of

MOST_STARTS, MOST_UNDISTURBED, START_SECONDS = 8, 2, 180


@dataclass
class Campaign:
    """All experiments of a seed, and what came of them."""

    seed: int
    faults: int
    folder: Path
    mounts: bool
    began_at: float = field(default_factory=time.monotonic)
    injected: Counter[str] = field(default_factory=Counter)
    experiments: int = 0
    starts: int = 0
    violations: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    references: list[Path | None] = field(default_factory=lambda: [None] * len(EXPERIMENTS))
    training: list[threading.Lock] = field(default_factory=lambda: [threading.Lock() for _ in EXPERIMENTS])

    def reference(self, kind: int) -> Path:
        """One of the small experiments left alone; trained when the first one of its kind is under way."""
        with self.training[kind]:
            found = self.references[kind] or reference(self.folder / f"reference-{kind}", kind)
            self.references[kind] = found
            return found

    def count(self, kind: str, line: str) -> None:
        """A fault was injected."""
        with self.lock:
            self.injected[kind] += 1
            print(f"{self.injected.total():4d}  {time.monotonic() - self.began_at:5.0f} s  {line}", flush=True)

    def work(self, numbers: Iterator[int]) -> None:
        """Experiment after experiment, until enough faults were injected."""
        while self.injected.total() < self.faults:
            with self.lock:
                number = next(numbers, None)
            if number is None:
                return
            with disk(self.folder / f"{number}", self.mounts) as folder:
                trial = Trial(self, number, folder)
                trial.run()
                if trial.violations:
                    # A disk of its own goes away with what it holds.
                    shutil.copytree(folder, self.folder / f"{number}-kept")

    def sum_up(self) -> None:
        """Print what came of it."""
        print(*(f"{count:4d}  {kind}" for kind, count in sorted(self.injected.items())), sep="\n")
        print(*(f"\nVIOLATION  {one}" for one in self.violations), sep="")
        seconds = time.monotonic() - self.began_at
        print(
            f"\nseed {self.seed}: {self.injected.total()} faults, {self.experiments} experiments, {self.starts} starts, "
            f"{len(self.violations)} violations, {seconds:.0f} s" + (f"; evidence: {self.folder}" if self.violations else "")
        )


@dataclass
class Trial:
    """One experiment under faults, until it is done."""

    campaign: Campaign
    number: int
    folder: Path
    history: list[str] = field(default_factory=list)
    harmed: dict[Path, str] = field(default_factory=dict)
    # Killed, and what they left was not waited for.
    earlier: list[Start] = field(default_factory=list)
    violations: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.dice = random.Random(f"{self.campaign.seed}/{self.number}")
        # Each of them in turn.
        self.kind = (self.campaign.seed + self.number) % len(EXPERIMENTS)
        self.reference = self.campaign.reference(self.kind)
        (run,) = (self.reference / "runs").iterdir()
        self.run_folder = self.folder / "runs" / run.name
        self.total_steps = json.loads((run / "receipt.json").read_text())["steps"]

    def run(self) -> None:
        """Start, hurt, start again; and compare what is left with the reference."""
        shutil.copytree(self.reference / "data", self.folder / "data")
        waiting, undisturbed = plan_of(self.campaign.seed, self.campaign.mounts, self.number), 0
        for number in range(MOST_STARTS):
            live, between = waiting.pop(0) if waiting else ([], [])
            start, code = self.start(number, live, patient=bool(between) or self.dice.random() < 0.5)
            if code == 4 and 4 in start.allowed and checks.beyond_repair(self.run_folder, self.harmed):
                self.history.append("given up, as it was beyond repair")
                break
            # A launcher that was killed may have finished before.
            finished = code == 0 or last(self.run_folder / "journal.jsonl", "started", "ended").get("outcome") == "done"
            for fault in between if not finished or all(one.kind in AFTER_THE_END for one in between) else ():
                self.say(fault, hurt(self.run_folder, fault, self.harmed))
                code = None
            if code == 0:
                self.judge(self.results())
                break
            undisturbed += not live and not waiting
            if undisturbed == MOST_UNDISTURBED:
                self.judge([f"not done after {undisturbed} starts that nobody disturbed"])
                break
        with self.campaign.lock:
            self.campaign.experiments += 1
        shutil.rmtree(self.folder / "data")

    def start(self, number: int, live: list[Fault], patient: bool) -> tuple[Start, int]:
        """One start with its faults, and all checks of its ending."""
        world_size = self.dice.choice((1, 2, 2, 3))
        write_params(self.folder, self.kind, world_size)
        old = checks.before(self.run_folder)
        self.history.append(f"start on {world_size}")
        start = Start(self.folder, self.run_folder, number, self.total_steps)
        if checks.beyond_repair(self.run_folder, self.harmed):
            start.allowed.add(4)
        for fault in live:
            self.say(fault, f"{fault}, step {{step}}" if start.inject(fault) else None)
        try:
            code = start.process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self.judge([f"has not ended after {START_SECONDS} s: {start.errors.read_text()[-300:]}"])
            start.power_cut()
            code = start.process.wait()
        self.history.append(f"exit {code}")
        with self.campaign.lock:
            self.campaign.starts += 1
        self.judge(checks.wrong_ending(start, code, old))
        self.earlier.append(start)
        if patient or start.died_at is None:
            while self.earlier:
                self.judge(checks.left_behind(self.earlier.pop()))
        (self.folder / "filler").unlink(missing_ok=True)
        return start, code

    def results(self) -> Iterator[str]:
        """What is wrong with an experiment that is done."""
        done = pipeline(self.folder, "sync")
        if done.returncode != 0 or "Traceback" in done.stderr:
            yield f"sync ends with {done.returncode}: {' '.join(done.stderr.split())[-200:]}"
        try:
            yield from checks.wrong_result(self.folder, self.run_folder, self.reference)
        except (OSError, ValueError, LookupError, sqlite3.Error) as error:
            yield f"what is left cannot be read: {type(error).__name__}: {error}"

    def say(self, fault: Fault, done: str | None) -> None:
        """Tell of a fault, if it was injected."""
        if done is not None:
            done = done.replace("{step}", str(step_of(self.run_folder)))
            self.history.append(done)
            self.campaign.count(fault.kind, f"experiment {self.number}: {done}")

    def judge(self, found: Iterator[str] | list[str]) -> None:
        """Keep what is wrong, with how it came to that."""
        for one in found:
            if one in self.violations:
                continue
            self.violations.add(one)
            told = f"experiment {self.number}: {one}\n      after: {', '.join(self.history)}"
            with self.campaign.lock:
                self.campaign.violations.append(told)
                print(f"      VIOLATION  {told}", flush=True)


def main() -> int:
    """Run a campaign; 1 if anything was violated."""
    parser = argparse.ArgumentParser(description="Random faults on small experiments.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="experiments at a time")
    parser.add_argument("--only", type=int, help="one experiment of the campaign")
    wanted = parser.parse_args()
    # A shell starts what is to run in the background with SIGINT ignored, and so would be all below.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    campaign = Campaign(wanted.seed, wanted.faults, folder, may_mount(folder))
    if not campaign.mounts:
        print("no disk-full: mounting a small disk is not permitted here")
    numbers = itertools.count(1) if wanted.only is None else iter([wanted.only])
    with ThreadPoolExecutor(wanted.jobs) as pool:
        working = [pool.submit(campaign.work, numbers) for _ in range(wanted.jobs)]
        try:
            for done in working:
                done.result()
        except KeyboardInterrupt:
            print("stopping after the experiments that are under way")
            campaign.faults = 0
    campaign.sum_up()
    if not campaign.violations:
        shutil.rmtree(folder)
    return int(bool(campaign.violations))


if __name__ == "__main__":
    sys.exit(main())
