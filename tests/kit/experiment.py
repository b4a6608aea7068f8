"""A small experiment in a folder of its own, and the commands on it."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline import prepare
from pipeline.config import Config
from pipeline.files import Paths
from pipeline.job import Job
from pipeline.tracking.database import opening

ROOT = Path(__file__).parents[2]


def settings(**changes: Any) -> dict[str, Any]:
    """A small experiment that takes seconds; `train__epochs=2` changes one key."""
    values: dict[str, Any] = {
        "data": {"name": "synthetic:1200"},
        "train": {"epochs": 2, "precision": "fp32", "learning_rate": 0.05},
        "dist": {"batch_size_per_gpu": 48, "world_size": 2, "lanes": 4},
        "checkpoint": {"every_steps": 5, "keep": 2},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            values.setdefault(section, {})[key] = value
        else:
            values[section] = value
    return values


# With a global batch that three ranks can share.
SMALL = settings(data__name="synthetic:3000", dist__batch_size_per_gpu=96)


# Long enough to be hurt.
LONGER = {"data": {"name": "synthetic:6000"}, "train__epochs": 4, "model__name": "lenet", "checkpoint__every_steps": 20}

# Longer still, for machines that are to have time to come.
PACED = LONGER | {"train__epochs": 8, "model__name": "mine.py:build", "dist__batch_size_per_gpu": None, "dist__global_batch": 96}
# mine.py: a lane takes its time while there is a file.
PACED_MODEL = """
import os
import time
from pathlib import Path

from torch import nn

class Paced(nn.Module):
    def forward(self, images):
        slow = Path(os.environ.get("SLOW_FILE", "slow")).exists()
        time.sleep(float(os.environ.get("SLOW_SECONDS", "0.05")) if slow else 0)
        return images

def build(channels: int, side: int, num_classes: int) -> nn.Module:
    return nn.Sequential(
        Paced(), nn.Conv2d(channels, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, num_classes))
"""


def clean_environment() -> dict[str, str]:
    """This environment without what would send an experiment's run elsewhere; `mlflow.set_tracking_uri` in a test sets such a thing.

    Nor is a GPU seen: bits, times and numbers of ranks in these tests are those of CPUs.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "DVC_"))}
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


@cache
def database() -> bytes:
    """MLflow's store as MLflow makes it: to make one takes three seconds, and most tests do not ask how."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mlflow.db"
        with opening(f"sqlite:///{path}"):
            return path.read_bytes()


@dataclass
class Experiment:
    """A params file in a folder of its own, and the commands on it."""

    folder: Path

    def set(self, **changes: Any) -> "Experiment":
        self.params.write_text(yaml.safe_dump(settings(**changes)))
        return self

    def with_database(self) -> "Experiment":
        (self.folder / "mlflow.db").write_bytes(database())
        return self

    @property
    def params(self) -> Path:
        return self.folder / "params.yaml"

    @property
    def run_folder(self) -> Path:
        (found,) = (path.parent for path in (self.folder / "runs").glob("*/journal.jsonl"))
        return found

    def start(self, command: str, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", command, "--params", str(self.params), *words],
            cwd=ROOT,
            env=clean_environment() | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str, *words: str, expect: int = 0, **environment: str) -> str:
        process = self.start(command, *words, **environment)
        said, _ = process.communicate(timeout=280)
        assert process.returncode == expect, said
        return said

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def journal(self, *kinds: str) -> list[dict[str, Any]]:
        # Up to the last whole line: a rank may be writing another one.
        lines = (self.run_folder / "journal.jsonl").read_text().rpartition("\n")[0].splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] in kinds]


def whole(values: dict[str, Any]) -> str:
    """A params file with every key, as DVC asks for every key that dvc.yaml names."""
    return yaml.safe_dump(Config.model_validate(values).model_dump(exclude={"model": {"source"}}))


def make_job(folder: Path, precision: str = "fp32", **changes: Any) -> Job:
    """A job on the CPU as the launcher would write it, with its data prepared."""
    folder.mkdir(parents=True, exist_ok=True)
    config = Config.model_validate(settings(**changes))
    paths = Paths(folder / "params.yaml")
    if not paths.prepared.exists():
        prepare.run(config, paths)
    values = {
        "config": config,
        "device": "cpu",
        "backend": "gloo",
        "precision": precision,
        "prepared": paths.prepared,
        "run": folder / "run",
    }
    return Job.model_validate(values)
