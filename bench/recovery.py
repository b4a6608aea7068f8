"""What a deaf MLflow and a copy in object storage cost a step and an exit, and a killed rank until the next step: `bench/run.py`."""

import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path

import psutil
import yaml

from bench.trial import STEP_HOOK
from pipeline.launch.agent_command import environment
from pipeline.launch.node import Node
from pipeline.tracking.journal import last

ROOT = Path(__file__).parents[1]
# The time of every optimizer step of local rank 0 and its process, eight bytes each.
CLOCK = STEP_HOOK.replace("WHAT", 'time.monotonic_ns().to_bytes(8, "little") + os.getpid().to_bytes(8, "little")')
SETTINGS = {"data": {"name": "synthetic:60000"}, "dist": {"lanes": 2}}


class Training:
    """One experiment in a folder, timed step by step."""

    def __init__(self, folder: Path, epochs: int, seed: int = 1):
        self.folder, self.steps_file = folder, folder / "steps"
        folder.mkdir(exist_ok=True)
        (folder / "hook").mkdir(exist_ok=True)
        (folder / "hook" / "sitecustomize.py").write_text(CLOCK)
        self.params = folder / "params.yaml"
        self.params.write_text(yaml.safe_dump(SETTINGS | {"seed": seed, "train": {"epochs": epochs}}))
        if not (folder / "data").exists():
            subprocess.run(self._command("prepare"), cwd=ROOT, env=self._variables(), check=True, capture_output=True)

    def _command(self, stage: str) -> list[str]:
        return [sys.executable, "-m", "pipeline", stage, "--params", str(self.params)]

    def _variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        return kept | {"PYTHONPATH": f"{self.folder / 'hook'}:{ROOT}", "BENCH_STEPS": str(self.steps_file)}

    def start(self, **variables: str) -> "subprocess.Popen[bytes]":
        self.steps_file.unlink(missing_ok=True)
        for pattern in ("receipt.json", "journal.jsonl", "mirror.json", "checkpoints/*"):
            for old in (self.folder / "runs").glob(f"*/{pattern}"):
                old.unlink()
        return subprocess.Popen(self._command("train"), cwd=ROOT, env=self._variables() | variables, stderr=subprocess.DEVNULL)

    def silent(self) -> None:
        """The same ranks without journal and mirror."""
        self.steps_file.unlink(missing_ok=True)
        job = max((self.folder / "runs").glob("*/logs/*/job.json"))
        for old in (self.folder / "runs").glob("*/checkpoints/*"):
            old.unlink()
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ROOT / "bench" / "silent.py")]
        subprocess.run([*words, str(job)], env=environment(Node(2, 1)) | self._variables(), check=True, capture_output=True)

    def steps(self) -> list[tuple[float, int]]:
        """When each step was done, in seconds, and by which process."""
        content = self.steps_file.read_bytes() if self.steps_file.exists() else b""
        return [(at / 1e9, process) for at, process in struct.iter_unpack("<QQ", content[: len(content) // 16 * 16])]

    def gaps(self, per_epoch: int) -> list[float]:
        """The seconds between steps; the first ones and those with a validation left out."""
        found = [after - before for before, after in pairwise(at for at, _ in self.steps())]
        return [gap for index, gap in enumerate(found, 1) if index > 20 and index % per_epoch]


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


def copied(folder: Path, pairs: int) -> dict[str, list[list[float]]]:
    """The seconds between steps without a copy, with one, and with a store that stops answering after the start, in turn."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    keys = {"AWS_ACCESS_KEY_ID": "name", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    # It would run on another machine: here it is not to take the ranks' time.
    store = subprocess.Popen(["nice", "-n", "19", *server], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    training, order = Training(folder, epochs=4), ["none", "taking", "black-holed"]
    found: dict[str, list[list[float]]] = {name: [] for name in order}
    for index in range(pairs):
        # Another prefix each time: what is there would be fetched.
        for name in order if index % 2 else order[::-1]:
            where = {"LOCKSTEP_COPY": f"s3://bench/{index}-{name}", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
            while index == 0 and store.poll() is None and not made(port):
                time.sleep(0.2)
            process = training.start(**(keys | where if name != "none" else {}))
            if name == "black-holed":
                wait_for(training, 20)
                store.send_signal(signal.SIGSTOP)
            assert process.wait() == 0
            store.send_signal(signal.SIGCONT)
            found[name].append(training.gaps(per_epoch=54000 // 256))
    store.kill()
    store.wait()
    return found


def made(port: int) -> bool:
    """Make the bucket; returns False while the server does not answer."""
    bucket = urllib.request.Request(f"http://127.0.0.1:{port}/bench", method="PUT")
    try:
        return urllib.request.urlopen(bucket, timeout=5).status == 200
    except OSError:
        return False


def restart(folder: Path, count: int) -> dict[str, list[float]]:
    """Seconds from the start of `train` to its first step, and from SIGKILL of a rank to the first step of the new ranks, in turn."""
    found: dict[str, list[float]] = {"cold start": [], "after SIGKILL": []}
    training = Training(folder, epochs=20)
    for number in range(count):
        started_at = time.monotonic()
        process = training.start()
        found["cold start"].append(first_step(training, set()) - started_at)
        wait_for(training, 100)
        before = {process for _, process in training.steps()}
        killed_at = time.monotonic()
        rank(process, number % 2).send_signal(signal.SIGKILL)
        found["after SIGKILL"].append(first_step(training, before) - killed_at)
        process.terminate()
        process.wait()
    return found


def first_step(training: Training, before: set[int]) -> float:
    """When the first process that is not one of these did its first step."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        for at, process in training.steps():
            if process not in before:
                return at
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
        if "-u" in (words := one.cmdline()) and "pipeline.training.train_rank" in words
    ]
    return sorted(found, key=lambda one: one.pid)[number]
