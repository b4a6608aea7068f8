"""The product against independent lanes and against the loops that people would write instead, in turn, on Fashion-MNIST."""

import gzip
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.silent import mean_speed
from pipeline.data.fashion_mnist import DIGESTS
from pipeline.launch.agent_command import environment
from pipeline.launch.node import Node
from pipeline.tracking.journal import read

ROOT = Path(__file__).parents[1]
# Beside the environment of the product, which has none of them.
PEERS = ROOT / ".venv" / "peers"
RANKS, BATCH_PER_RANK = 2, 128
LOOPS = {"examples": "examples.py", "accelerate": "with_accelerate.py", "lightning": "with_lightning.py"}


@dataclass(frozen=True)
class Model:
    """What is measured of a model: steps enough for some seconds, after the first ones."""

    name: str
    steps: int
    warm: int


MODELS = {one.name: one for one in (Model("lenet", 200, 10), Model("resnet18", 12, 2), Model("torchvision:mobilenet_v3_small", 30, 4))}


@dataclass
class Contest:
    """One model's arms, measured in turn."""

    model: Model
    scratch: Path
    speeds: dict[str, list[float]] = field(default_factory=dict)

    def arms(self) -> list[str]:
        return [f"{kind}, {precision}" for kind in ("product", "independent lanes") for precision in ("bf16", "fp32")] + list(LOOPS)

    def round(self, number: int) -> None:
        """Measure every arm once; every other round the other way round."""
        for arm in self.arms()[:: 1 if number % 2 else -1]:
            self.speeds.setdefault(arm, []).append(self.measured(arm))

    def measured(self, arm: str) -> float:
        kind, _, precision = arm.partition(", ")
        if kind == "product":
            return self.product(precision)
        if kind.startswith("independent"):
            return said([sys.executable, str(ROOT / "bench" / "independent.py"), str(self.job(precision)), str(self.model.steps)])
        return self.loop(LOOPS[arm])

    def folder(self, precision: str) -> Path:
        """An experiment of as many steps, with prepared data."""
        folder = self.scratch / f"{self.model.name.replace(':', '-')}-{precision}"
        if not folder.exists():
            folder.mkdir()
            steps = self.model.warm + self.model.steps
            images = min(60000, -(-steps * RANKS * BATCH_PER_RANK * 10 // 9) + 256)
            values: dict[str, Any] = {
                "data": {"name": f"fashion-mnist:{images}", "root": str(self.scratch / "FashionMNIST" / "raw")},
                "model": {"name": self.model.name},
                "train": {"epochs": 1, "precision": precision},
                "tracking": {"log_every_steps": max(1, self.model.warm // 2)},
            }
            (folder / "params.yaml").write_text(yaml.safe_dump(values))
            self.pipeline("prepare", folder)
        return folder

    def pipeline(self, command: str, folder: Path) -> None:
        words = [sys.executable, "-m", "pipeline", command, "--params", str(folder / "params.yaml")]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def job(self, precision: str) -> Path:
        folder = self.folder(precision)
        if not list(folder.glob("runs/*/logs/*/job.json")):
            self.product(precision)
        return max(folder.glob("runs/*/logs/*/job.json"))

    def product(self, precision: str) -> float:
        """Train as a user would, with journal, MLflow and checkpoints."""
        folder = self.folder(precision)
        for pattern in ("receipt.json", "journal.jsonl", "mirror.json", "checkpoints/*"):
            for old in (folder / "runs").glob(f"*/{pattern}"):
                old.unlink()
        self.pipeline("train", folder)
        (journal,) = folder.glob("runs/*/journal.jsonl")
        return mean_speed([line["values"] for line in read(journal) if "train/images_per_second" in line.get("values", {})])

    def loop(self, script: str) -> float:
        work = {"root": str(self.scratch), "model": self.model.name, "side": 28, "batch": BATCH_PER_RANK}
        work |= {"warm": self.model.warm, "steps": self.model.steps, "workers": 0}
        return torchrun(ROOT / "bench" / "peers" / script, json.dumps(work))


def torchrun(script: Path, argument: str) -> float:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(script), argument]
    return said(words, environment(Node(RANKS, 1)) | {"PYTHONPATH": str(PEERS), "PYTHONWARNINGS": "ignore"})


def said(words: list[str], variables: dict[str, str] | None = None) -> float:
    """The figure that a command prints as its last line."""
    done = subprocess.run(words, env=variables or dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [one for one in done.stdout.splitlines() if one.startswith('{"images')]
    return float(json.loads(line)["images_per_second"])


def unpack(raw: Path, scratch: Path) -> None:
    """Fashion-MNIST as torchvision's own data set reads it."""
    folder = scratch / "FashionMNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for name in DIGESTS:
        (folder / name).write_bytes(gzip.decompress((raw / f"{name}.gz").read_bytes()))


def ratios(speeds: dict[str, list[float]]) -> dict[str, list[float]]:
    """What the page states, round by round."""
    pairs = {
        f"product, {precision} / independent lanes": (f"product, {precision}", f"independent lanes, {precision}")
        for precision in ("bf16", "fp32")
    }
    pairs |= {f"product, {precision} / {loop}": (f"product, {precision}", loop) for precision in ("bf16", "fp32") for loop in LOOPS}
    return {name: [one / other for one, other in zip(speeds[left], speeds[right], strict=True)] for name, (left, right) in pairs.items()}


def main() -> None:
    """`python -m bench.against SCRATCH RAW ROUNDS MODEL…`"""
    scratch, raw, rounds, names = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    scratch.mkdir(exist_ok=True)
    unpack(raw, scratch)
    for name in names:
        contest = Contest(MODELS[name], scratch)
        for number in range(rounds):
            contest.round(number)
            print(number, {arm: round(values[-1]) for arm, values in contest.speeds.items()}, flush=True)
        for what, values in [*contest.speeds.items(), *ratios(contest.speeds).items()]:
            print(
                f"  {name}: {what:<44} median {statistics.median(values):>9,.2f}  {min(values):,.2f} to {max(values):,.2f}  n={len(values)}"
            )


if __name__ == "__main__":
    main()
