"""What a deaf MLflow and a copy in object storage cost a step and an exit, and a killed rank until the next step: `bench/run.py`."""

import contextlib
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from bisect import bisect
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.trial import STEP_HOOK
from pipeline.launch.agent_command import environment
from pipeline.launch.node import Node
from pipeline.tracking.journal import last

ROOT = Path(__file__).parents[1]
# The time of every optimizer step of local rank 0 and its process, eight bytes each.
CLOCK = STEP_HOOK.replace("WHAT", 'time.monotonic_ns().to_bytes(8, "little") + os.getpid().to_bytes(8, "little")')


class Training:
    """One experiment in a folder, timed step by step."""

    def __init__(self, folder: Path, epochs: int, images: int = 60000, batch: int = 128, every_steps: int = 200, **dist: Any):
        self.folder, self.steps_file = folder, folder / "steps"
        folder.mkdir(exist_ok=True)
        (folder / "hook").mkdir(exist_ok=True)
        (folder / "hook" / "sitecustomize.py").write_text(CLOCK)
        self.params = folder / "params.yaml"
        settings: dict[str, Any] = {"data": {"name": f"synthetic:{images}"}, "dist": {"lanes": 2, "batch_size_per_gpu": batch} | dist}
        settings |= {"train": {"epochs": epochs}, "checkpoint": {"every_steps": every_steps}}
        self.params.write_text(yaml.safe_dump(settings))
        if not (folder / "data").exists():
            subprocess.run(self._command("prepare"), cwd=ROOT, env=self._variables(), check=True, capture_output=True)

    def _command(self, stage: str) -> list[str]:
        return [sys.executable, "-m", "pipeline", stage, "--params", str(self.params)]

    def _variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        return kept | {"PYTHONPATH": f"{self.folder / 'hook'}:{ROOT}", "BENCH_STEPS": str(self.steps_file)}

    def start(self, *words: str, **variables: str) -> "subprocess.Popen[bytes]":
        """Begin from the start: `train`, or another command of this experiment's."""
        self.steps_file.unlink(missing_ok=True)
        self._forget()
        command, options = words[:1] or ("train",), words[1:]
        words = (*self._command(*command), *options)
        return subprocess.Popen(words, cwd=ROOT, env=self._variables() | variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def leads(self, port: int) -> "subprocess.Popen[bytes]":
        """The same as the leader of one worker."""
        return self.start("lead", "--workers=1", f"--port={port}", *self._command("train"))

    def _forget(self) -> None:
        for pattern in ("receipt.json", "journal.jsonl", "mirror.json", "checkpoints/*"):
            for old in (self.folder / "runs").glob(f"*/{pattern}"):
                old.unlink()

    def silent(self) -> None:
        """The same ranks without journal and mirror."""
        self.steps_file.unlink(missing_ok=True)
        job = max((self.folder / "runs").glob("*/logs/*/job.json"))
        self._forget()
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ROOT / "bench" / "silent.py")]
        subprocess.run([*words, str(job)], env=environment(Node(2, 1)) | self._variables(), check=True, capture_output=True)

    def bare(self) -> "subprocess.Popen[bytes]":
        """The same steps as a hand-written script takes them."""
        self.steps_file.unlink(missing_ok=True)
        job = max((self.folder / "runs").glob("*/logs/*/job.json"))
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ROOT / "bench" / "bare.py")]
        return subprocess.Popen([*words, str(job)], env=environment(Node(2, 1)) | self._variables(), stderr=subprocess.DEVNULL)

    def steps(self) -> list[tuple[float, int]]:
        """When each step was done, in seconds, and by which process."""
        content = self.steps_file.read_bytes() if self.steps_file.exists() else b""
        return [(at / 1e9, process) for at, process in struct.iter_unpack("<QQ", content[: len(content) // 16 * 16])]

    def gaps(self, per_epoch: int) -> list[float]:
        """The seconds between steps; the first ones and those with a validation left out."""
        found = [after - before for before, after in pairwise(at for at, _ in self.steps())]
        return [gap for index, gap in enumerate(found, 1) if index > 20 and index % per_epoch]

    def parted(self, per_epoch: int, turns: list[float]) -> tuple[list[float], list[float]]:
        """The same after the first of these moments, and those between even ones and the next apart; what holds a moment is left out."""
        parts: tuple[list[float], list[float]] = [], []
        for index, (before, after) in enumerate(pairwise(at for at, _ in self.steps()), 1):
            turn = bisect(turns, before)
            if turn and turn == bisect(turns, after) and index % per_epoch:
                parts[turn % 2].append(after - before)
        return parts


def p99(seconds: list[float]) -> float:
    """Of a hundred, the second longest."""
    return statistics.quantiles(seconds, n=100)[98]


def deaf(folder: Path, pairs: int) -> tuple[dict[str, list[list[float]]], list[float]]:
    """The seconds between steps with a black-holed server and without any tracking, in turn; how late the exits were."""
    hole = socket.create_server(("127.0.0.1", 0))
    training = Training(folder, epochs=4)
    uri = f"http://127.0.0.1:{hole.getsockname()[1]}"
    found: dict[str, list[list[float]]] = {"black-holed": [], "none": []}
    late = []
    for index in range(pairs):
        for name in ("black-holed", "none") if index % 2 == 0 else ("none", "black-holed"):
            if name == "none" and not list(folder.glob("runs/*/logs/*/job.json")):
                training.start(MLFLOW_TRACKING_URI=uri).wait()
            if name == "none":
                training.silent()
            else:
                assert training.start(MLFLOW_TRACKING_URI=uri).wait() == 0
                (journal,) = folder.glob("runs/*/journal.jsonl")
                late.append(time.time() - last(journal, "ended")["at"] / 1000)
            found[name].append(training.gaps(per_epoch=54000 // 256))
    hole.close()
    return found, late


def copied(folder: Path, rounds: int) -> dict[str, list[tuple[list[float], list[float]]]]:
    """The seconds between steps with a copy being kept and without, for a store that takes it, is down, answers late or with errors.

    Without: for every other three seconds of the same training, the copying process is stopped. In the end nothing is copied at all,
    which shows what these figures can tell.
    """
    # Of the tests, which need boto3; a machine for `gpu.py` has none.
    from tests.kit.servers import Proxy
    from tests.kit.storage import BUCKET, Storage

    class Elsewhere(Proxy):
        """As if it were on another machine: it is not to take the ranks' time."""

        def answer(self, asked: BaseHTTPRequestHandler) -> None:
            # Of this thread alone, on Linux.
            os.setpriority(os.PRIO_PROCESS, 0, 19)
            # Whoever has waited too long is gone.
            with contextlib.suppress(OSError):
                super().answer(asked)

    store = Storage()
    os.setpriority(os.PRIO_PROCESS, store.pid, 19)
    proxy, training = Elsewhere(store.uri), Training(folder, epochs=3, batch=32, every_steps=50)
    modes = {"takes it": "pass", "is down": "hole", "answers after 3 s": "slow", "answers with errors": "500", "is not used": ""}
    found: dict[str, list[tuple[list[float], list[float]]]] = {name: [] for name in modes}
    for index in range(rounds):
        for name in list(modes)[:: 1 if index % 2 else -1]:
            # Another place each time: what is there would be fetched.
            where = store.variables(proxy.uri) | {"LOCKSTEP_COPY": f"s3://{BUCKET}/{index}-{name.replace(' ', '-')}"}
            proxy.mode = "pass"
            process = training.start(**(where if modes[name] else {}))
            # A start asks whether there is a copy, and is refused where nobody answers.
            wait_for(training, 20)
            proxy.mode = modes[name] or "pass"
            found[name].append(training.parted(per_epoch=54000 // 64, turns=turns(process)))
    proxy.close()
    store.kill()
    return found


def turns(process: "subprocess.Popen[bytes]", seconds: float = 3.0) -> list[float]:
    """Stop the copying process of a training, and let it go on, in turn until the training has ended: when that was, first the stop."""
    copying = [one for one in psutil.Process(process.pid).children(recursive=True) if "pipeline.runs.copy_process" in one.cmdline()]
    found: list[float] = []
    while process.poll() is None:
        for one in copying:
            # It may have ended.
            with contextlib.suppress(psutil.NoSuchProcess):
                one.resume() if len(found) % 2 else one.suspend()
        found.append(time.monotonic())
        # Not beyond the end, which waits for the copy.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    assert process.returncode == 0
    return found


def restart(folder: Path, count: int) -> dict[str, list[float]]:
    """Seconds from the start of `train`, and of a bare script, to the first step, and from SIGKILL of a rank to those of the new ranks."""
    names = "cold start", "after SIGKILL", "after SIGKILL, a step never taken before", "bare DDP script"
    found = {name: list[float]() for name in names}
    # As many lanes as by default; a checkpoint is there when the rank is killed.
    training = Training(folder, epochs=20, lanes=4, every_steps=50)

    def bare() -> None:
        started_at = time.monotonic()
        process = training.bare()
        found["bare DDP script"].append(new_step(training, set()) - started_at)
        process.terminate()
        process.wait()

    for number in range(count):
        # The first needs what a training leaves.
        if number % 2:
            bare()
        started_at, process = time.monotonic(), training.start()
        found["cold start"].append(new_step(training, set()) - started_at)
        wait_for(training, 120)
        before = {process for _, process in training.steps()}
        killed_at = time.monotonic()
        rank(process, number // 2 % 2).send_signal(signal.SIGKILL)
        found["after SIGKILL"].append(new_step(training, before) - killed_at)
        taken = sum(process in before for _, process in training.steps())
        (journal,) = (folder / "runs").glob("*/journal.jsonl")
        # There the new ranks began.
        saved = last(journal, "checkpoint")["step"]
        assert saved == taken // 50 * 50, (saved, taken)
        found["after SIGKILL, a step never taken before"].append(new_step(training, before, taken - saved) - killed_at)
        process.terminate()
        process.wait()
        if number % 2 == 0:
            bare()
    return found


def new_step(training: Training, before: set[int], others: int = 0) -> float:
    """When the first process that is not one of these had done a step, and so many others before it."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if len(new := [at for at, process in training.steps() if process not in before]) > others:
            return new[others]
        time.sleep(0.02)
    raise AssertionError("no step")


def wait_for(training: Training, count: int) -> None:
    until = time.monotonic() + 120
    while len(training.steps()) < count:
        assert time.monotonic() < until
        time.sleep(0.05)


def rank(process: "subprocess.Popen[bytes]", number: int) -> psutil.Process:
    found = [
        one
        for one in psutil.Process(process.pid).children(recursive=True)
        if "-u" in (words := one.cmdline()) and {"pipeline.training.train_rank", "pipeline.elastic.train_rank"} & {*words}
    ]
    return sorted(found, key=lambda one: one.pid)[number]
