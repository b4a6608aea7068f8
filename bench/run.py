"""What a step, a training, a start and a no-op cost, and against whom: `make bench`, or parts of it: `make bench BENCH=lenet`."""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench import images as own  # noqa: E402
from bench import learning as learned  # noqa: E402
from bench import link, losses, page, recovery, starts  # noqa: E402
from bench.against import MODELS, conditions, install_peers, machine_in_words, measured, unpack, usual_precisions  # noqa: E402
from bench.arguments import add_parts, at_least_one  # noqa: E402
from bench.jobs import torchrun  # noqa: E402
from bench.strategies import WAYS  # noqa: E402
from bench.trainings import pipeline, speed_of  # noqa: E402


def main() -> None:
    parts = {"lenet": lenet, "resnet18": resnet18, "algorithms": algorithms, "strategies": strategies, "product": product}
    parts |= {"elastic": elastic, "checkpoint": checkpoint, "start": start, "tracking": tracking, "storage": storage}
    parts |= {
        "restart": restart,
        "images": images,
        "learning": learning,
        # It needs a package index.
        "against": against,
    }
    parser = argparse.ArgumentParser(description="What a step, a training, a start and a no-op cost, and against whom.")
    add_parts(parser, parts)
    parser.add_argument("--pairs", type=at_least_one, default=7, help="rounds, %(default)s by default; each is measured in turn")
    parser.add_argument("--seconds", type=float, default=3.0, help="a round of `lenet`, %(default)s by default; `resnet18`: 8/3 of it")
    parser.add_argument("--out", type=Path, default=Path("bench-results.json"), help="where `against` and `learning` write their results")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which of them `against` measures")
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp32"), default=usual_precisions(), help="of the product in `against`")
    parser.add_argument("--publish", action="store_true", help="write what `against` measures into README.md and docs/performance.md")
    wanted = parser.parse_args()
    print(f"{platform.system()}, {psutil.cpu_count()} CPUs, {machine_in_words()}")
    print(f"torch {version('torch')}, Python {platform.python_version()}\n")
    for name in wanted.parts:
        parts[name](wanted)


def show(name: str, values: list[float], unit: str = "") -> None:
    print(f"  {name:<52} median {statistics.median(values):>10,.3f}{unit}  {min(values):,.3f} to {max(values):,.3f}  n={len(values)}")


def lenet(wanted: argparse.Namespace) -> None:
    steps("lenet", wanted.pairs, wanted.seconds)


def resnet18(wanted: argparse.Namespace) -> None:
    steps("resnet18", wanted.pairs, wanted.seconds * 8 / 3)


def algorithms(wanted: argparse.Namespace) -> None:
    """Every algorithm of the ordered reduction, LeNet on four ranks of one machine, and, for root, of two with a slow link."""
    steps("lenet", wanted.pairs, wanted.seconds, "algorithms", 4)
    for rate in ("1gbit", "200mbit"):
        try:
            with link.link(rate):
                show_steps("lenet", wanted.pairs, link.steps("lenet", wanted.pairs, wanted.seconds), f"two machines of two ranks, {rate}")
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"two machines with a link of {rate}: not measured ({error})")


def steps(model: str, pairs: int, seconds: float, kinds: str = "lanes", ranks: int = 2) -> None:
    """Ordered with lanes = world size against native, in turn in one job."""
    show_steps(model, pairs, json.loads(torchrun("steps.py", model, str(pairs), str(seconds), kinds, ranks=ranks)), f"world {ranks}")


def show_steps(model: str, pairs: int, found: dict[str, Any], where: str) -> None:
    print(f"steps, {model}, {found['precision']}, {where}, 128 images a rank, {found['steps']} steps in each of {pairs} rounds, images/s:")
    for name, values in found["speeds"].items():
        show(name, values)
        for other in ("native", "flat", "ordered"):
            if other in found["speeds"] and other != name != "native":
                show(f"{name} / {other}", [one / two for one, two in zip(values, found["speeds"][other], strict=True)])


def product(wanted: argparse.Namespace) -> None:
    """The product, its ranks alone under torchrun (no launcher, journal or mirror) and a hand-written loop, in turn; 1 lane a rank."""
    names = ("product", "ranks alone", "hand-written")
    speeds, shares = {name: list[float]() for name in names}, list[float]()
    with tempfile.TemporaryDirectory() as scratch:
        for index in range(wanted.pairs):
            order = names if index % 2 else names[::-1]
            for name in order:
                speeds[name].append(speed_of(name, Path(scratch), shares))
    print("product, lenet, world 2, 128 images a rank, 1 lane a rank, 12 epochs; images/s after the first steps, without validation:")
    for name in names:
        show(name, speeds[name])
    for name in names[1:]:
        show(f"product / {name}", [one / other for one, other in zip(speeds["product"], speeds[name], strict=True)])
    show("CPU time beside the ranks / theirs, while they train", [100 * one for one in shares], " %")


def against(wanted: argparse.Namespace) -> None:
    """The product, its arithmetic alone, plain torch, and the loops of others, in turn; the results as JSON, too."""
    results = conditions(wanted.models, wanted.precisions)
    if wanted.publish:
        page.refuse_a_mixture(results, wanted.models)
    install_peers()
    with tempfile.TemporaryDirectory() as scratch:
        unpack(Path(scratch))
        for name in wanted.models:
            print(f"{name}, world 2, 4 lanes, Fashion-MNIST, images/s, ratios, shares:")
            results["models"][name] = measured(name, Path(scratch), wanted.pairs, wanted.precisions)
            for what, values in chain(*(part.items() for part in results["models"][name].values())):
                show(what, values)
            wanted.out.write_text(json.dumps(results, indent=2) + "\n")
    if wanted.publish:
        page.publish(results)


def learning(wanted: argparse.Namespace) -> None:
    """What LeNet learns in equal epochs, and the seconds to 90.0 % of the test images, over five seeds; the results as JSON, too."""
    with tempfile.TemporaryDirectory() as scratch:
        for said, figures in learned.report(Path(scratch), wanted.out).items():
            print(f"{said}:")
            for name, values in figures.items():
                show(name, values)


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
    found = starts.no_ops(wanted.pairs)
    for name, values in found.items():
        show(name, values, " s")
    show("nothing to do / three empty stages", [one / other for one, other in zip(*found.values(), strict=True)])
    first_steps, peaks = [], []
    for seed in range(3):
        with tempfile.TemporaryDirectory() as scratch:
            params = Path(scratch) / "params.yaml"
            params.write_text(yaml.safe_dump({"seed": seed, "data": {"name": "synthetic:60000"}, "train": {"epochs": 1}}))
            pipeline("prepare", params)
            seconds_to_first, peak = starts.watch(params)
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
    """A copy in object storage that takes it, or after the start is down, late or full of errors, against none, in the same trainings."""
    with tempfile.TemporaryDirectory() as scratch:
        found = recovery.copied(Path(scratch) / "copied", wanted.pairs)
    print(
        "lenet, world 2, 32 images a rank, 2 lanes, a checkpoint every 50 steps, p99 of a step while a copy is kept / while it is stopped:"
    )
    for name, runs in found.items():
        copying, stopped = ([*chain(*part)] for part in zip(*runs, strict=True))
        show(f"object storage {name}", [recovery.p99(one) / recovery.p99(other) for one, other in runs])
        of_all = recovery.p99(copying) / recovery.p99(stopped)
        print(f"    of all {len(copying):,} and {len(stopped):,} steps {of_all:.3f}: {1000 * recovery.p99(copying):.1f} ms")


def images(wanted: argparse.Namespace) -> None:
    """JPEGs prepared, read while training, and a start on many of them; each in turn with what it is compared with."""
    with tempfile.TemporaryDirectory() as scratch:
        for said, figures in own.report(Path(scratch), wanted.pairs, wanted.seconds):
            print(said)
            for name, values in figures.items():
                show(name, values)


def restart(wanted: argparse.Namespace) -> None:
    """A killed rank against a cold start, and that against a bare DDP script's, in turn."""
    with tempfile.TemporaryDirectory() as scratch:
        found = recovery.restart(Path(scratch) / "restart", wanted.pairs)
    print("lenet, world 2, 4 lanes: seconds to the first (new) step; lanes are tried at once in the third")
    for name, values in found.items():
        show(name, values, " s")
        if name.startswith("after"):
            show(f"{name} / cold start", [one / other for one, other in zip(values, found["cold start"], strict=True)])
    show("cold start / bare DDP script", [one / other for one, other in zip(found["cold start"], found["bare DDP script"], strict=True)])


def elastic(wanted: argparse.Namespace) -> None:
    """A lost rank whose peers go on, against a restart of all; what that costs while none is lost."""
    parts = {"from SIGKILL to the next step": losses.lost, "from a machine's end to the next step": losses.machine_lost}
    parts |= {"of a step": losses.undisturbed, "of a step, one rank slow": losses.slowed}
    for what, measure in parts.items():
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(Path(scratch), wanted.pairs)
        for name, values in (found | {"ratio": [one / other for one, other in zip(*found.values(), strict=True)]}).items():
            show(f"seconds {what}, {name}", values)


def checkpoint(wanted: argparse.Namespace) -> None:
    """How long a training waits for a full checkpoint, against `torch.save`, in turn."""
    found = json.loads(torchrun("stall.py", str(wanted.pairs), ranks=1).splitlines()[-1])
    print("resnet18 with momentum, 85 MB, one thread:")
    for name, values in found.items():
        show(name, [1000 * one for one in values], " ms")
    show("stall / torch.save + fsync", [one / other for one, other in zip(found["stall"], found["torch.save + fsync"], strict=True)])


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


if __name__ == "__main__":
    main()
