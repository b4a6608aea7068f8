"""What a step, a training, a start and a no-op cost, and against whom: `make bench`, or parts of it: `make bench BENCH=lenet`."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench import recovery  # noqa: E402
from bench.silent import mean_speed  # noqa: E402
from bench.strategies import WAYS  # noqa: E402
from pipeline.hardware import machine  # noqa: E402
from pipeline.launch.agent_command import environment  # noqa: E402
from pipeline.launch.node import Node  # noqa: E402
from pipeline.tracking.journal import read  # noqa: E402


def main() -> None:
    parts = {"lenet": lenet, "resnet18": resnet18, "strategies": strategies, "product": product}
    parts |= {"start": start, "tracking": tracking, "storage": storage, "restart": restart}
    parser = argparse.ArgumentParser(description="What a step, a training, a start and a no-op cost, and against whom.")
    parser.add_argument("parts", nargs="*", metavar="PART", choices=parts, help=f"of {', '.join(parts)}; all if none is named")
    parser.add_argument("--pairs", type=int, default=7, help="how often each is measured, in turn with what it is compared with")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="how long `steps` measures LeNet in each pair; ResNet-18 takes 8/3 of it"
    )
    wanted = parser.parse_args()
    print(f"{platform.system()}, {psutil.cpu_count()} CPUs, {machine.detect().cpu}")
    print(f"torch {version('torch')}, Python {platform.python_version()}\n")
    for name in wanted.parts or parts:
        parts[name](wanted)


def show(name: str, values: list[float], unit: str = "") -> None:
    print(f"  {name:<52} median {statistics.median(values):>10,.3f}{unit}  {min(values):,.3f} to {max(values):,.3f}  n={len(values)}")


def torchrun(script: str, *arguments: str, ranks: int = 2) -> str:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(ROOT / "bench" / script),
        *arguments,
    ]
    return subprocess.run(command, env=environment(Node(ranks, 1)), capture_output=True, text=True, check=True).stdout


def lenet(wanted: argparse.Namespace) -> None:
    steps("lenet", wanted.pairs, wanted.seconds)


def resnet18(wanted: argparse.Namespace) -> None:
    steps("resnet18", wanted.pairs, wanted.seconds * 8 / 3)


def steps(model: str, pairs: int, seconds: float) -> None:
    """Ordered with lanes = world size against native, world 2, in turn in one job."""
    found = json.loads(torchrun("steps.py", model, str(pairs), str(seconds)))
    print(f"steps, {model}, world 2, 128 images a rank, {found['steps']} steps in each of {pairs} rounds, images/s:")
    for name, values in found["speeds"].items():
        show(name, values)
        ratios = [one / other for one, other in zip(values, found["speeds"]["native"], strict=True)]
        if name != "native":
            show(f"{name} / native", ratios)


def product(wanted: argparse.Namespace) -> None:
    """The whole product, the product without journal and mirror, and a hand-written loop, in turn; lanes = world size."""
    names = ("product", "without journal and mirror", "hand-written")
    speeds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        for index in range(wanted.pairs):
            order = names if index % 2 else names[::-1]
            for name in order:
                speeds[name].append(speed_of(name, Path(scratch)))
    print("product, lenet, world 2, 128 images a rank, 2 lanes, 840 steps, images/s after the first ones, validation left out:")
    for name in names:
        show(name, speeds[name])
    for name in names[1:]:
        show(f"product / {name}", [one / other for one, other in zip(speeds["product"], speeds[name], strict=True)])


def speed_of(name: str, scratch: Path) -> float:
    """Train once, in a folder that keeps its prepared data."""
    values = {"seed": 1, "data": {"name": "synthetic:60000"}, "train": {"epochs": 4}, "dist": {"lanes": 2}}
    params = scratch / "params.yaml"
    params.write_text(yaml.safe_dump(values))
    if not (scratch / "data").exists():
        pipeline("prepare", params)
    for pattern in ("receipt.json", "journal.jsonl", "mirror.json", "checkpoints/*"):
        for old in (scratch / "runs").glob(f"*/{pattern}"):
            old.unlink()
    if name == "product":
        pipeline("train", params)
        (journal,) = (scratch / "runs").glob("*/journal.jsonl")
        return mean_speed([line["values"] for line in read(journal) if "train/images_per_second" in line.get("values", {})])
    jobs = list((scratch / "runs").glob("*/logs/*/job.json"))
    if not jobs:
        pipeline("train", params)
        return speed_of(name, scratch)
    return float(torchrun("silent.py" if name.startswith("without") else "bare.py", str(jobs[0])).split()[-1])


def pipeline(command: str, params: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "pipeline", command, "--params", str(params)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def start(wanted: argparse.Namespace) -> None:
    """What every user pays before and around the steps, and a rank's peak memory on a job with the default's shapes."""
    for name, command in (
        ("import pipeline.config", ["-c", "import pipeline.config"]),
        ("--help", ["-m", "pipeline", "--help"]),
    ):
        seconds = []
        for _ in range(wanted.pairs):
            started_at = time.monotonic()
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
            seconds.append(time.monotonic() - started_at)
        show(name, seconds, " s")
    show("dvc repro with nothing to do", no_op(wanted.pairs), " s")
    first_steps, peaks = [], []
    for seed in range(3):
        with tempfile.TemporaryDirectory() as scratch:
            params = Path(scratch) / "params.yaml"
            params.write_text(yaml.safe_dump({"seed": seed, "data": {"name": "synthetic:60000"}, "train": {"epochs": 1}}))
            pipeline("prepare", params)
            seconds_to_first, peak = watch(params)
            first_steps.append(seconds_to_first)
            peaks.append(peak / 2**20)
    show("train to the first log line", first_steps, " s")
    show("peak memory of a rank", peaks, " MiB")


def tracking(wanted: argparse.Namespace) -> None:
    """A black-holed MLflow against no tracking at all, in turn."""
    with tempfile.TemporaryDirectory() as scratch:
        found, late = recovery.deaf(Path(scratch) / "deaf", wanted.pairs)
    print("lenet, world 2, 128 images a rank, 2 lanes, 840 steps, p99 of a step:")
    for name, runs in found.items():
        show(f"MLflow {name}", [1000 * recovery.p99(gaps) for gaps in runs], " ms")
    show("black-holed / none", [recovery.p99(one) / recovery.p99(other) for one, other in zip(*found.values(), strict=True)])
    show("of all their steps", [recovery.p99([*chain(*found["black-holed"])]) / recovery.p99([*chain(*found["none"])])])
    show("how late the exit is", late, " s")


def storage(wanted: argparse.Namespace) -> None:
    """A copy in object storage that takes it, or answers no more after the start, against no copy, in turn."""
    with tempfile.TemporaryDirectory() as scratch:
        found = recovery.copied(Path(scratch) / "copied", wanted.pairs)
    print("lenet, world 2, 128 images a rank, 2 lanes, 840 steps, five checkpoints, p99 of a step:")
    for name, runs in found.items():
        show(f"object storage {name}", [1000 * recovery.p99(gaps) for gaps in runs], " ms")
    for name in ("taking", "black-holed"):
        show(f"{name} / none", [recovery.p99(one) / recovery.p99(other) for one, other in zip(found[name], found["none"], strict=True)])
        show("of all their steps", [recovery.p99([*chain(*found[name])]) / recovery.p99([*chain(*found["none"])])])


def restart(wanted: argparse.Namespace) -> None:
    """A killed rank against a cold start, in turn."""
    with tempfile.TemporaryDirectory() as scratch:
        found = recovery.restart(Path(scratch) / "restart", wanted.pairs)
    print("lenet, world 2: seconds to the first (new) step")
    for name, values in found.items():
        show(name, values, " s")
    show("after SIGKILL / cold start", [one / other for other, one in zip(*found.values(), strict=True)])


def strategies(wanted: argparse.Namespace) -> None:
    """What a rank holds, sends and computes under every strategy, in turn; ResNet-18, world 2 (dataparallel: one process)."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for _ in range(wanted.pairs):
        for name, found in measured.items():
            ranks = 1 if name == "dataparallel" else 2
            found.append(json.loads(torchrun("strategies.py", name, str(wanted.seconds), ranks=ranks)))
    print("resnet18, 28 x 28, 64 images a step in 4 lanes, momentum, a thread a rank:")
    for name, found in measured.items():
        for figure in found[0]:
            show(f"{name}: {figure}", [one[figure] for one in found])


def no_op(count: int) -> list[float]:
    """Seconds of a `dvc repro` that finds everything up to date, in a clone with small data."""
    with tempfile.TemporaryDirectory() as scratch:
        clone, bin_folder = Path(scratch) / "clone", Path(sys.executable).parent
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        params = clone / "params.yaml"
        params.write_text(params.read_text().replace("name: fashion-mnist", "name: synthetic:1200").replace("epochs: 10", "epochs: 1"))
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MLFLOW_"))}
        variables["PATH"] = f"{bin_folder}:{variables['PATH']}"
        seconds = []
        for _ in range(1 + count):
            started_at = time.monotonic()
            subprocess.run([str(bin_folder / "dvc"), "repro"], cwd=clone, env=variables, check=True, capture_output=True)
            seconds.append(time.monotonic() - started_at)
        # The first one did the work.
        return seconds[1:]


def watch(params: Path) -> tuple[float, int]:
    """One training: seconds until the journal has a metric, and the highest resident memory of any rank."""
    started_at, first, peak = time.monotonic(), 0.0, 0
    process = subprocess.Popen([sys.executable, "-m", "pipeline", "train", "--params", str(params)], cwd=ROOT, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        journals = list(params.parent.glob("runs/*/journal.jsonl"))
        if not first and journals and any(line["kind"] == "metrics" for line in read(journals[0])):
            first = time.monotonic() - started_at
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                if "-u" in child.cmdline() and "pipeline.training.train_rank" in child.cmdline():
                    fields = Path(f"/proc/{child.pid}/status").read_text().split()
                    peak = max(peak, int(fields[fields.index("VmHWM:") + 1]) * 1024)
            except (psutil.NoSuchProcess, OSError, ValueError):
                continue
        time.sleep(0.2)
    assert process.returncode == 0
    return first, peak


if __name__ == "__main__":
    main()
