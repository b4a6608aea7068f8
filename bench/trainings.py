"""Trainings of the product, and of what it is compared with, in a folder."""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from bench.jobs import ROOT, torchrun
from bench.silent import mean_speed
from pipeline.data import fashion_mnist
from pipeline.tracking.journal import read

# Prepared once, trained again and again.
WRITTEN = ("receipt.json", "journal.jsonl", "mirror.json", "checkpoints/*")
RANK, AGENT = "pipeline.training.train_rank", "pipeline.launch.agent"
# Between two looks at the time that processes have computed: each takes some itself.
LOOK_SECONDS = 5.0


def pipeline(command: str, params: Path) -> None:
    """Run one of the product's commands to a good end."""
    done = subprocess.run([sys.executable, "-m", "pipeline", command, "--params", str(params)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def forget(folder: Path) -> None:
    """Remove what a training has written: the next one begins at its first step."""
    for old in [path for pattern in WRITTEN for path in (folder / "runs").glob(f"*/{pattern}")]:
        old.unlink()


def computed_seconds(launcher: int) -> tuple[dict[int, float], dict[int, float]]:
    """The time that a training's ranks have computed, and all beside them, by process."""
    ranks: dict[int, float] = {}
    beside: dict[int, float] = {}
    with contextlib.suppress(psutil.Error):
        training = psutil.Process(launcher)
        for one in [training, *training.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                words = one.cmdline()
                found = ranks if RANK in words and AGENT not in words else beside
                found[one.pid] = sum(one.cpu_times()[:2])
    return ranks, beside


def share_beside(params: Path) -> float:
    """Train once; the time that launcher, agent and mirror compute while all ranks train, as a share of theirs."""
    command = [sys.executable, "-m", "pipeline", "train", "--params", str(params)]
    looks: list[tuple[dict[int, float], dict[int, float]]] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while process.poll() is None:
                time.sleep(LOOK_SECONDS)
                ranks, beside = computed_seconds(process.pid)
                # Only while all ranks run, once they have started up.
                if ranks and min(ranks.values()) > LOOK_SECONDS and (not looks or ranks.keys() == looks[0][0].keys()):
                    looks.append((ranks, beside))
        finally:
            # It trains in a folder that is about to go.
            if process.poll() is None:
                process.terminate()
                process.wait()
        errors.seek(0)
        assert process.returncode == 0, errors.read()
    assert looks, "no rank was seen while it trained"
    assert len(looks) > 1, f"its ranks ran for less than {2 * LOOK_SECONDS:.0f} s; give it more epochs"
    first, final = looks[0], looks[-1]
    of_ranks, of_others = (sum(final[one][pid] - first[one][pid] for pid in final[one].keys() & first[one].keys()) for one in (0, 1))
    return of_others / of_ranks


def speed_of(name: str, scratch: Path, shares: list[float]) -> float:
    """Train LeNet once, in a folder that keeps its prepared data: "product", "ranks alone" or "hand-written".

    The product's share of CPU time beside the ranks is appended to `shares`.
    """
    data = {"name": "fashion-mnist", "root": str(fashion_mnist.find(ROOT / "data" / "raw" / "fashion-mnist"))}
    params = scratch / "params.yaml"
    params.write_text(yaml.safe_dump({"seed": 1, "data": data, "train": {"epochs": 12}, "dist": {"lanes": 2}}))
    if not (scratch / "data").exists():
        pipeline("prepare", params)
    forget(scratch)
    if name == "product":
        shares.append(share_beside(params))
        (journal,) = (scratch / "runs").glob("*/journal.jsonl")
        return mean_speed([line["values"] for line in read(journal) if "train/images_per_second" in line.get("values", {})])
    jobs = list((scratch / "runs").glob("*/logs/*/job.json"))
    if not jobs:
        pipeline("train", params)
        return speed_of(name, scratch, shares)
    return float(torchrun("silent.py" if name == "ranks alone" else "bare.py", str(jobs[0])).split()[-1])
