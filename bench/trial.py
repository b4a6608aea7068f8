"""One experiment to be hurt, as a plain script or as Lockstep: started, counted, killed and looked at the same way."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[1]
# How long a command that computes no step and does not end is waited for.
LIMIT_SECONDS = 120
EXPERIMENT = {
    "data": {"name": "synthetic:6000"},
    "train": {"epochs": 4, "precision": "fp32", "learning_rate": 0.05},
    "dist": {"world_size": 2, "batch_size_per_gpu": 48},
    "checkpoint": {"every_steps": 20},
}
# A sitecustomize.py with which local rank 0 writes something for every optimizer step. Ranks are executed, or forked from what the
# agent has imported.
STEP_HOOK = """
import os, sys, time
if "BENCH_STEPS" in os.environ and ("LOCAL_RANK" in os.environ or {"pipeline.launch.agent", "pipeline.elastic.agent"} & {*sys.orig_argv}):
    from torch.optim.optimizer import register_optimizer_step_post_hook
    def after_step(*_):
        if os.environ["LOCAL_RANK"] == "0":
            with open(os.environ["BENCH_STEPS"], "ab", buffering=0) as steps:
                steps.write(WHAT)
    register_optimizer_step_post_hook(after_step)
"""
COUNTER = STEP_HOOK.replace("WHAT", 'b"."')


class Plain:
    """The plain script under torchrun."""

    name = "plain"

    def command(self, folder: Path) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
        return [*torchrun, str(ROOT / "bench" / "plain.py"), str(folder)]

    def newest(self, folder: Path) -> Path:
        return folder / "latest.pt"

    def weights(self, path: Path) -> dict[str, Tensor]:
        return torch.load(path, weights_only=True)["model"]


class Lockstep:
    """The same experiment by the real command line."""

    name = "lockstep"

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-m", "pipeline", "train", "--params", str(folder / "params.yaml")]

    def newest(self, folder: Path) -> Path:
        found = [
            path.parent / json.loads(path.read_text())["checkpoints"][-1]["file"] for path in folder.glob("runs/*/checkpoints/index.json")
        ]
        return found[0] if found else folder / "nothing"

    def weights(self, path: Path) -> dict[str, Tensor]:
        return {name.removeprefix("model."): value for name, value in load_file(path).items() if name.startswith("model.")}


class Trial:
    """One side's experiment in a folder of its own, with what was done to it and what became of it."""

    def __init__(self, side: Plain | Lockstep, scratch: Path, case: str, **train: float):
        self.side, self.folder, self.exits, self.seconds = side, scratch / f"{case}-{side.name}", list[str](), 0.0
        shutil.copytree(scratch / "template", self.folder)
        params = EXPERIMENT | {"train": EXPERIMENT["train"] | train}
        (self.folder / "params.yaml").write_text(yaml.safe_dump(params))
        self.store = self.uri = f"sqlite:///{self.folder / 'mlflow.db'}"
        self.counter = self.folder / "steps"
        self.counter.touch()

    def start(self) -> None:
        self.process = spawn(self.side.command(self.folder), self.folder, MLFLOW_TRACKING_URI=self.uri, BENCH_STEPS=str(self.counter))
        self.started_at = time.monotonic()

    def steps(self) -> int:
        return self.counter.stat().st_size

    def reaches(self, steps: float) -> bool:
        """Wait until so many steps were computed; False where the command ended before, or hung."""
        seen, seen_at = self.steps(), time.monotonic()
        while seen < steps:
            if self.process.poll() is not None:
                self.ended(f"exit {self.process.returncode}")
                return False
            if time.monotonic() - seen_at > LIMIT_SECONDS:
                self.kill(f"no step and no end for {LIMIT_SECONDS} s")
                return False
            time.sleep(0.002)
            if self.steps() > seen:
                seen, seen_at = self.steps(), time.monotonic()
        return True

    def ended(self, how: str) -> None:
        self.seconds += time.monotonic() - self.started_at
        self.exits.append(how)

    def finish(self) -> "Trial":
        """Let the command end by itself."""
        self.reaches(math.inf)
        return self

    def kill(self, how: str = "killed") -> None:
        """All of the job at once."""
        kill_tree(self.process)
        self.ended(how)

    def kill_rank(self, rank: int) -> None:
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                # A forked rank has it in its title.
                if one.environ().get("LOCAL_RANK") == str(rank) or f"(local rank {rank})" in one.cmdline():
                    one.kill()


def spawn(command: list[str], folder: Path, **variables: str) -> "subprocess.Popen[bytes]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PET_"))}
    path = os.pathsep.join([str(folder.parent / "hook"), str(ROOT)])
    with (folder / "said.log").open("a") as said:
        return subprocess.Popen(
            command, cwd=folder, env=kept | variables | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said
        )


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Stopped first, so that none of them sees another die."""
    if process.poll() is not None:
        return
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for one in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                act(one)
    process.wait()
