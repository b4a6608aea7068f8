"""Trainings of the product, and of what it is compared with, in a folder."""

import subprocess
import sys
from pathlib import Path

import yaml

from bench.jobs import ROOT, torchrun
from bench.silent import mean_speed
from pipeline.data import fashion_mnist
from pipeline.tracking.journal import read

# Prepared once, trained again and again.
WRITTEN = ("receipt.json", "journal.jsonl", "mirror.json", "checkpoints/*")


def pipeline(command: str, params: Path) -> None:
    """Run one of the product's commands to a good end."""
    done = subprocess.run([sys.executable, "-m", "pipeline", command, "--params", str(params)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def forget(folder: Path) -> None:
    """Remove what a training has written: the next one begins at its first step."""
    for old in [path for pattern in WRITTEN for path in (folder / "runs").glob(f"*/{pattern}")]:
        old.unlink()


def speed_of(name: str, scratch: Path) -> float:
    """Train LeNet once, in a folder that keeps its prepared data: "product", "without journal and mirror" or "hand-written"."""
    data = {"name": "fashion-mnist", "root": str(fashion_mnist.find(ROOT / "data" / "raw" / "fashion-mnist"))}
    params = scratch / "params.yaml"
    params.write_text(yaml.safe_dump({"seed": 1, "data": data, "train": {"epochs": 4}, "dist": {"lanes": 2}}))
    if not (scratch / "data").exists():
        pipeline("prepare", params)
    forget(scratch)
    if name == "product":
        pipeline("train", params)
        (journal,) = (scratch / "runs").glob("*/journal.jsonl")
        return mean_speed([line["values"] for line in read(journal) if "train/images_per_second" in line.get("values", {})])
    jobs = list((scratch / "runs").glob("*/logs/*/job.json"))
    if not jobs:
        pipeline("train", params)
        return speed_of(name, scratch)
    return float(torchrun("silent.py" if name.startswith("without") else "bare.py", str(jobs[0])).split()[-1])
