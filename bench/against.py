"""The product against independent lanes and against the loops that people would write instead, in turn, on Fashion-MNIST."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from bench.peak import flops_per_image
from bench.silent import mean_speed
from bench.trainings import forget, pipeline
from pipeline import models
from pipeline.data import fashion_mnist
from pipeline.hardware import machine
from pipeline.hardware.cgroup import usable_cpus
from pipeline.launch.agent_command import environment
from pipeline.launch.node import Node
from pipeline.tracking.journal import read

ROOT = Path(__file__).parents[1]
# Beside the environment of the product, which has none of them.
PEERS = ROOT / ".venv" / "peers"
RANKS, BATCH_PER_RANK, SIDE = 2, 128, 28
# Of whole global batches, after prepare has held a tenth out.
TRAINING_IMAGES = 53760
LOOPS = {"examples": "examples.py", "accelerate": "with_accelerate.py", "lightning": "with_lightning.py"}
PRODUCT, INDEPENDENT, PLAIN, ONE_RANK = "product", "independent lanes", "plain torch", "product on one rank of two threads"
# The first of them that a machine has.
INSTRUCTIONS = {"amx_bf16": "AMX, bf16", "avx512_bf16": "AVX-512, bf16", "avx512f": "AVX-512, no bf16", "avx2": "AVX2, no bf16"}


@dataclass(frozen=True)
class Model:
    """What is measured of a model: steps enough for many seconds, after the first ones, which are two log lines."""

    name: str
    steps: int
    warm: int


MODELS = {one.name: one for one in (Model("lenet", 400, 20), Model("resnet18", 10, 2), Model("torchvision:mobilenet_v3_small", 80, 40))}


@dataclass
class Contest:
    """One model's arms, measured in turn."""

    model: Model
    scratch: Path
    precisions: list[str]
    speeds: dict[str, list[float]] = field(default_factory=dict)
    peaks: list[dict[str, float]] = field(default_factory=list)

    def arms(self) -> list[str]:
        ours = [f"{kind}, {precision}" for precision in self.precisions for kind in (PRODUCT, ONE_RANK, INDEPENDENT)]
        return [*ours, PLAIN, *LOOPS]

    def round(self, number: int) -> None:
        """Measure every arm once; every other round the other way round."""
        arms = self.arms()
        self.speeds = self.speeds or {arm: [] for arm in arms}
        for arm in arms[:: 1 if number % 2 else -1]:
            self.speeds[arm].append(self.measured(arm))
        self.peaks.append(json.loads(torchrun(ROOT / "bench" / "peak.py", "1").splitlines()[-1]))

    def measured(self, arm: str) -> float:
        kind, _, precision = arm.partition(", ")
        if kind in (PRODUCT, ONE_RANK):
            return self.product(precision, 1 if kind == ONE_RANK else RANKS)
        if kind in (INDEPENDENT, PLAIN):
            plain = ["--plain"] if kind == PLAIN else []
            words = [str(ROOT / "bench" / "independent.py"), str(self.job(precision or "fp32")), str(self.model.steps), *plain]
            return speed_in(output([sys.executable, *words]))
        return self.loop(LOOPS[arm])

    def folder(self, precision: str, ranks: int = RANKS) -> Path:
        """An experiment of as many steps, with prepared data; on as many threads in all, however many ranks.

        Checkpoints come as often as by default: two within the steps of LeNet that are timed, none within so few of a larger model. So do
        log lines, but for ResNet-18, which has more of them.
        """
        folder = self.scratch / f"{self.model.name.replace(':', '-')}-{precision}-{ranks}"
        if not folder.exists():
            folder.mkdir()
            images = (self.model.warm + self.model.steps) * RANKS * BATCH_PER_RANK
            epochs = -(-images // TRAINING_IMAGES)
            images = min(60000, -(-images * 10 // 9) + 256)
            values: dict[str, Any] = {
                "data": {"name": f"fashion-mnist:{images}", "root": str(self.scratch / "FashionMNIST" / "raw")},
                "model": {"name": self.model.name},
                "train": {"epochs": epochs, "precision": precision},
                "dist": {"world_size": ranks, "batch_size_per_gpu": BATCH_PER_RANK * RANKS // ranks, "threads_per_rank": RANKS // ranks},
                "tracking": {"log_every_steps": self.model.warm // 2},
            }
            (folder / "params.yaml").write_text(yaml.safe_dump(values))
            pipeline("prepare", folder / "params.yaml")
        return folder

    def job(self, precision: str) -> Path:
        folder = self.folder(precision)
        if not list(folder.glob("runs/*/logs/*/job.json")):
            self.product(precision)
        return max(folder.glob("runs/*/logs/*/job.json"))

    def product(self, precision: str, ranks: int = RANKS) -> float:
        """Train as a user would, with journal, MLflow and checkpoints."""
        folder = self.folder(precision, ranks)
        forget(folder)
        pipeline("train", folder / "params.yaml")
        (journal,) = folder.glob("runs/*/journal.jsonl")
        return mean_speed([line["values"] for line in read(journal) if "train/images_per_second" in line.get("values", {})])

    def loop(self, script: str) -> float:
        work = {"root": str(self.scratch), "model": self.model.name, "side": SIDE, "batch": BATCH_PER_RANK}
        work |= {"warm": self.model.warm, "steps": self.model.steps, "workers": 0}
        return speed_in(torchrun(ROOT / "bench" / "peers" / script, json.dumps(work)))

    def shares(self) -> dict[str, float]:
        """Every part's share of a step's time."""
        job = self.job(self.precisions[0])
        forget(job.parents[4])
        return json.loads(torchrun(ROOT / "bench" / "parts.py", str(job)).splitlines()[-1])

    def shares_of_peak(self) -> dict[str, list[float]]:
        """The product's arithmetic as a multiple of what products of matrices reach, round by round."""
        flops = flops_per_image(models.build(self.model.name, 1, SIDE, 10), (1, SIDE, SIDE))
        return {
            f"{PRODUCT}, {one} / products of matrices": [
                flops * speed / peak[one] for speed, peak in zip(self.speeds[f"{PRODUCT}, {one}"], self.peaks, strict=True)
            ]
            for one in self.precisions
        }

    def ratios(self) -> dict[str, list[float]]:
        """What the page states, round by round."""
        pairs: dict[str, tuple[str, str]] = {}
        for precision in self.precisions:
            ours = f"{PRODUCT}, {precision}"
            pairs |= {f"{ours} / {other}": (ours, other) for other in (f"{INDEPENDENT}, {precision}", f"{ONE_RANK}, {precision}", *LOOPS)}
            pairs[f"{INDEPENDENT}, {precision} / {PLAIN}"] = f"{INDEPENDENT}, {precision}", PLAIN
        return {
            name: [one / other for one, other in zip(self.speeds[left], self.speeds[right], strict=True)]
            for name, (left, right) in pairs.items()
        }


def torchrun(script: Path, argument: str) -> str:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(script), argument]
    return output(words, environment(Node(RANKS, 1)) | {"PYTHONPATH": f"{ROOT}:{PEERS}", "PYTHONWARNINGS": "ignore"})


def output(words: list[str], variables: dict[str, str] | None = None) -> str:
    """What a command prints."""
    done = subprocess.run(words, env=variables or dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def speed_in(said: str) -> float:
    """The one line with a speed."""
    (line,) = [one for one in said.splitlines() if one.startswith('{"images')]
    return float(json.loads(line)["images_per_second"])


def install_peers() -> None:
    """Install Accelerate and Lightning where only their loops find them."""
    lock, done = ROOT / "bench" / "peers" / "requirements.lock", PEERS / ".ready"
    if not done.exists() or done.stat().st_mtime < lock.stat().st_mtime:
        words = ["install", "--quiet", "--no-deps", "--require-hashes", "--upgrade", "--target", str(PEERS), "--requirement", str(lock)]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        done.touch()


def unpack(scratch: Path) -> None:
    """Fashion-MNIST as torchvision's own data set reads it."""
    folder = scratch / "FashionMNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    found = fashion_mnist.find(ROOT / "data" / "raw" / "fashion-mnist")
    for name in fashion_mnist.DIGESTS:
        (folder / name).write_bytes(gzip.decompress((found / f"{name}.gz").read_bytes()))


def usual_precisions() -> list[str]:
    """In bf16 too where that is what `auto` takes."""
    return ["bf16", "fp32"] if machine.detect().fast_bf16_on_cpu else ["fp32"]


def measured(name: str, scratch: Path, rounds: int, precisions: list[str]) -> dict[str, dict[str, list[float]]]:
    """Every figure of a model, round by round."""
    found = Contest(MODELS[name], scratch, precisions)
    for number in range(rounds):
        found.round(number)
        print(f"  round {number + 1}:", {arm: round(values[-1]) for arm, values in found.speeds.items()}, file=sys.stderr, flush=True)
    shares = [found.shares() for _ in range(3)]
    return {
        "images_per_second": found.speeds,
        "ratios": found.ratios(),
        "share of the peak": found.shares_of_peak(),
        "share of a step": {part: [one[part] for one in shares] for part in shares[0]},
    }


def machine_in_words() -> str:
    """The CPU's own name, and what it multiplies with."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return machine.detect().cpu
    text = info.read_text()
    named = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    has = next((words for flag, words in INSTRUCTIONS.items() if re.search(rf"\b{flag}\b", text)), "no AVX2")
    return f"{named[1].replace('(R)', '') if named else 'an unnamed CPU'} ({has})"


def generation() -> str:
    """Its family and model, by their numbers: a virtual machine's CPU may be named as the generation before."""
    info = Path("/proc/cpuinfo")
    found = re.findall(r"^(cpu family|model)\s*: (\d+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return ", ".join(f"{name.removeprefix('cpu ')} {number}" for name, number in dict(found).items()) or "unknown"


def commit() -> str:
    """What the code is, also where it was changed since; what a bench writes is no code."""
    try:
        name, changed = (
            subprocess.check_output(["git", *words], cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", "pipeline", "bench/*.py"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}, changed" if changed else name


def conditions(models: Sequence[str], precisions: Sequence[str]) -> dict[str, Any]:
    """What figures depend on, for a file of results."""
    found: dict[str, Any] = {"machine": machine_in_words(), "cpu": generation(), "cpus": usable_cpus(), "torch": version("torch")}
    work = {name: {"steps": MODELS[name].steps, "images a rank": BATCH_PER_RANK} for name in models}
    return found | {"precisions": list(precisions), "commits": dict.fromkeys(models, commit()), "work": work, "models": {}}
