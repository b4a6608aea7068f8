"""Whatever is done to a run in its starts and between them: it goes on from its newest good checkpoint, with every figure once."""

import gc
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from pipeline.config import Config, ConfigError, MachineError
from pipeline.job import Job
from pipeline.runs.resume import import_run
from pipeline.training.state import State
from tests.kit.experiment import settings as experiment_settings
from tests.kit.lossy_kills import Killed, Killer
from tests.kit.lossy_ledger import MEMORY, PER_EPOCH, TOTAL, Ledger, plan_of, unhurt_of
from tests.kit.lossy_training import OnlyRank, Told, Watch, parts, state_of, train

IDENTITY = b'{\n  "seed": 1\n}\n'
HEADER: dict[str, Any] = {"experiment": "one", "name": "one", "params": {}, "tags": {}}
# Before which of the file operations of a start a kill comes, if one comes.
KILL = st.none() | st.integers(1, 150)


class FirstOfMany(OnlyRank):
    """Rank 0, which tells the others what it has read."""

    def __init__(self) -> None:
        self.content = b""
        self.tensors: list[Tensor] = []

    def broadcast_bytes(self, content: bytes) -> bytes:
        self.content = content
        return content

    def broadcast(self, values: Tensor) -> None:
        self.tensors.append(values.clone())


class OneOfMany(OnlyRank):
    """Another rank: it reads and writes nothing."""

    def __init__(self, first: FirstOfMany):
        self._first, self._tensors = first, list(first.tensors)

    def on_rank_zero(self, thing: Any, otherwise: Any) -> Any:
        return otherwise

    def while_others_wait(self, thing: Any) -> None:
        """Rank 0 does it."""

    def broadcast_bytes(self, content: bytes) -> bytes:
        return self._first.content

    def broadcast(self, values: Tensor) -> None:
        values.copy_(self._tensors.pop(0))


class Runs(RuleBasedStateMachine):
    """A training that is started, killed, damaged and taken over by other runs."""

    @initialize(correct=st.tuples(*[st.integers(3, 6)] * (TOTAL // PER_EPOCH)))
    def begin(self, correct: tuple[int, ...]) -> None:
        self.correct = correct
        self.home, self.number = Path(tempfile.mkdtemp(dir=MEMORY)), 0
        self.begin_a_run()

    def teardown(self) -> None:
        shutil.rmtree(self.home)

    def begin_a_run(self) -> None:
        self.number += 1
        self.ledger = Ledger(self.home / str(self.number), unhurt_of(self.correct))

    @rule(steps=st.integers(1, 7), per_checkpoint=st.integers(1, 5), keep=st.integers(1, 3), world=st.integers(1, 3), kill=KILL)
    def start(self, steps: int, per_checkpoint: int, keep: int, world: int, kill: int | None) -> None:
        ledger, first, descriptors = self.ledger, FirstOfMany(), descriptors_of_this_process()
        ledger.begin(keep)
        try:
            with Killer.before(kill or 0, ledger.run):
                found = train(ledger.run, keep, steps, ledger, plan_of(self.correct, per_checkpoint), first)
        except Killed:
            ledger.killed()
        except MachineError as error:
            assert "no good checkpoint is left" in str(error)
            assert ledger.none, f"{error}, though one of {ledger.allowed} is there"
            # As it says: the run is moved away.
            self.begin_a_run()
        else:
            ledger.ended(min(found.restored + steps, TOTAL))
            self.look_at_the_others(found, first, world)
        close_all_but(descriptors)

    def look_at_the_others(self, found: Told, first: FirstOfMany, world: int) -> None:
        """Every rank has restored what rank 0 has."""
        for _ in range(1, world):
            model, optimizer = parts()
            other = Told(self.ledger.run / "nothing", 1, OneOfMany(first), self.ledger.run / "nothing", Watch())
            assert other.restore(State(model, optimizer)) == found.restored
            assert state_of(model, optimizer) == found.states[found.restored]

    @rule(
        name=st.sampled_from(
            ["step-*", "step-*", "best-*", "index.json", "index.json", "journal.jsonl", "journal.jsonl", "*.json", "*lock"]
        ),
        which=st.integers(0, 3),
        how=st.sampled_from(["cut", "flip", "delete"]),
        share=st.floats(0, 1, exclude_max=True),
    )
    def hurt(self, name: str, which: int, how: str, share: float) -> None:
        """Do something to a file while nobody runs; the newest first."""
        files = sorted(self.ledger.run.rglob(name), reverse=True)
        if files:
            # A flipped bit of a figure that no checkpoint covers yet cannot be told from a figure.
            self.ledger.hurt(files[which % len(files)], "cut" if name == "journal.jsonl" and how == "flip" else how, share)

    @precondition(lambda self: self.ledger.written)
    @rule(kill=KILL)
    def take_over(self, kill: int | None) -> None:
        """Go on in another run's folder, as with --resume."""
        source, descriptors = self.ledger, descriptors_of_this_process()
        allowed, none = source.may_be_restored()
        identity = source.run / "identity.json"
        is_named = identity.exists() and identity.read_bytes() == IDENTITY
        self.begin_a_run()
        values = {"device": "cpu", "backend": "gloo", "precision": "fp32", "prepared": self.home, "run": self.ledger.run}
        job = Job.model_validate({"config": Config.model_validate(experiment_settings())} | values)
        try:
            with suppress(Killed), Killer.before(kill or 0, self.ledger.run):
                import_run(source.run, job, json.loads(IDENTITY), HEADER)
            close_all_but(descriptors)
            # Once more, as whoever killed it would; what was imported whole is left as it is.
            import_run(source.run, job, json.loads(IDENTITY), HEADER)
        except (ConfigError, MachineError) as error:
            assert none or not is_named or allowed == {0}, f"{error}, though one of {allowed} is there"
            shutil.rmtree(self.ledger.run, ignore_errors=True)
            self.ledger = source
        else:
            self.ledger.take_over(source)


def descriptors_of_this_process() -> set[int]:
    """Without that of the listing itself."""
    return {int(one.name) for one in list(Path("/proc/self/fd").iterdir()) if one.is_symlink()}


def close_all_but(descriptors: set[int]) -> None:
    """What the kernel does for a process that is killed; first what Python closes by itself."""
    if descriptors_of_this_process() - descriptors:
        gc.collect()
    for one in descriptors_of_this_process() - descriptors:
        os.close(one)


def test_a_kill_before_the_first_checkpoint_is_listed_costs_a_start_from_the_beginning() -> None:
    found = set()
    for kill in range(40, 80):
        runs = Runs()
        runs.begin(correct=(3, 3, 3, 3))
        # The best model is written first, and listed in an index that names no checkpoint yet.
        runs.start(keep=1, kill=kill, per_checkpoint=4, steps=4, world=1)
        listed = bool(runs.ledger.content("index.json"))
        runs.start(keep=1, kill=None, per_checkpoint=1, steps=1, world=1)
        found.add((listed, runs.ledger.first))
        runs.teardown()
    assert found >= {(False, 0), (True, 0), (True, 4)}


class TestRuns(Runs.TestCase):
    settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=15)
