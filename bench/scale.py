"""A step on many ranks: a model that is fitted here, checked on a number of ranks that it has not seen, and carried to 1,024 GPUs.

python bench/scale.py                 measures on 2, 4, 6 and 8 ranks, fits on all but 6, and prints what follows
python bench/scale.py --publish       and writes the tables and the picture of docs/scale.md
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from math import exp, prod
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.jobs import torchrun  # noqa: E402
from bench.page import filled  # noqa: E402
from pipeline.hardware.cgroup import usable_cpus  # noqa: E402
from pipeline.parallel.hierarchy import levels  # noqa: E402

KEPT, PAGE, PLOT = ROOT / "bench" / "scale.json", ROOT / "docs" / "scale.md", ROOT / "docs" / "pictures" / "scale.svg"
FITTED, HELD_OUT = (2, 4, 8), 6
ALGORITHMS = ("flat", "butterfly")
# LeNet's parameters, in fp32; images that a rank computes in a step.
LENET_BYTES, BATCH = 4 * 129_068, 128
MICRO = 1e-6


def sizes(ranks: int, per_machine: int, algorithm: str) -> list[int]:
    """How many ranks a group has on each level, a lane a rank."""
    return levels([1] * ranks, per_machine, algorithm)


def messages(groups: list[int]) -> int:
    """How many messages a rank sends in a step."""
    return sum(2 * (size - 1) for size in groups)


def sent(groups: list[int], size_bytes: float) -> float:
    """How many bytes a rank sends in a step."""
    return sum(2 * size_bytes / prod(groups[:level]) * (size - 1) / size for level, size in enumerate(groups))


# -- here: all ranks share the cores, so that what each does adds up


def measure(pairs: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step by ranks and algorithm, of LeNet with a lane of 128 images a rank."""
    found: dict[str, dict[str, list[float]]] = {}
    for ranks in sorted((*FITTED, HELD_OUT)):
        speeds = json.loads(torchrun("steps.py", "lenet", str(pairs), str(seconds), "algorithms", ranks=ranks))["speeds"]
        found[str(ranks)] = {name: [BATCH * ranks / speed for speed in speeds[name]] for name in ALGORITHMS}
    return found


def shares_of(ranks: int, algorithm: str) -> list[float]:
    """How often a step has a lane's seconds, a message's, and a byte's in it, on these cores."""
    groups, together = sizes(ranks, ranks, algorithm), max(1.0, ranks / usable_cpus())
    return [together, together * messages(groups), together * sent(groups, LENET_BYTES)]


def fit(measured: dict[str, dict[str, list[float]]]) -> list[float]:
    """Seconds of a lane, of a message and of a byte, none of them negative, that come nearest, relatively, to what was measured."""
    cases = [(ranks, name) for ranks in FITTED for name in ALGORITHMS]
    times = np.array([statistics.median(measured[str(ranks)][name]) for ranks, name in cases])
    rows = np.array([shares_of(ranks, name) for ranks, name in cases]) / times[:, None]
    left, costs = [0, 1, 2], np.zeros(3)
    while left:
        found = np.linalg.lstsq(rows[:, left], np.ones(len(cases)), rcond=None)[0]
        if (found >= 0).all():
            costs[left] = found
            break
        left.remove(left[int(found.argmin())])
    return costs.tolist()


# -- elsewhere: every rank has a device of its own


@dataclass(frozen=True)
class Cluster:
    """Figures of others, where docs/scale.md says from whom."""

    per_machine: int = 8
    # Bytes a second: a GPU's links within a machine, and its share of the network.
    inside: float = 370e9
    outside: float = 48e9
    message_seconds: float = 2 * MICRO
    launch_seconds: float = 5 * MICRO
    # Hours between two failures of one GPU: 7.9 for 1,024 of them.
    hours_to_failure: float = 7.9 * 1024
    restart_seconds: float = 60.0
    regroup_seconds: float = 5.0
    steps_per_checkpoint: int = 200


@dataclass(frozen=True)
class Job:
    """A model on one GPU."""

    name: str
    size_bytes: float
    step_seconds: float
    # Of a rank's step, as a share of it.
    spread: float = 0.02
    bucket_bytes: float = 25e6


JOBS = (Job("ResNet-18", 44.7e6, 0.05), Job("ResNet-50", 102e6, 0.15), Job("1 GB", 1e9, 0.5))


def reduction(job: Job, ranks: int, algorithm: str, cluster: Cluster) -> float:
    """Seconds of all messages and additions of a step, nothing else going on."""
    machines = max(1, ranks // cluster.per_machine)
    per_machine = min(ranks, cluster.per_machine)
    groups = sizes(ranks, per_machine, algorithm) if machines > 1 or algorithm == "butterfly" else [ranks]
    buckets, seconds = max(1.0, job.size_bytes / job.bucket_bytes), 0.0
    for level, size in enumerate(groups):
        before = prod(groups[:level])
        part = job.size_bytes / before
        # Ranks of this level that are on another machine.
        far = 0.0 if before * size <= per_machine else 1 - min(1.0, per_machine / (before * size)) if before < per_machine else 1.0
        crossing = part * (size - 1) / size
        moved = 2 * crossing * (far / cluster.outside + (1 - far) / cluster.inside)
        seconds += moved + buckets * (2 * (size - 1) * cluster.message_seconds + (size - 1) * cluster.launch_seconds)
    return seconds


def step(job: Job, ranks: int, algorithm: str, cluster: Cluster, draws: int = 200) -> float:
    """Seconds of a step: the slowest rank's, and of the reduction what does not fit beside the backward pass."""
    rng = np.random.default_rng(1)
    slowest = float(np.mean(np.max(job.step_seconds * (1 + job.spread * rng.standard_normal((draws, ranks))), axis=1)))
    whole, buckets = reduction(job, ranks, algorithm, cluster), max(1.0, job.size_bytes / job.bucket_bytes)
    # Two thirds of a step are backward; the last bucket comes after it.
    return slowest + max(whole / buckets, whole - 2 / 3 * job.step_seconds)


def kept(job: Job, ranks: int, step_seconds: float, cluster: Cluster, elastic: bool) -> float:
    """The share of time that is not lost to failures."""
    between = cluster.hours_to_failure * 3600 / ranks
    lost = (
        cluster.regroup_seconds + step_seconds / 2 if elastic else cluster.restart_seconds + cluster.steps_per_checkpoint / 2 * step_seconds
    )
    return exp(-lost / between)


# -- what is printed and published


def tables(measured: dict[str, dict[str, list[float]]]) -> dict[str, str]:
    """The parts of the page."""
    costs = fit(measured)
    lines = ["| ranks | algorithm | measured, ms (lowest to highest) | model, ms | error |", "|---|---|---|---|---|"]
    for ranks in sorted((*FITTED, HELD_OUT)):
        for name in ALGORITHMS:
            times = measured[str(ranks)][name]
            found, model = statistics.median(times), float(np.dot(shares_of(ranks, name), costs))
            spread = f"{1e3 * found:.1f} ({1e3 * min(times):.1f} to {1e3 * max(times):.1f}, n = {len(times)})"
            title = f"**{ranks}, not fitted**" if ranks == HELD_OUT else str(ranks)
            lines.append(f"| {title} | {name} | {spread} | {1e3 * model:.1f} | {100 * (model / found - 1):+.1f} % |")
    lane, message, byte = costs
    fitted = f"A lane takes {1e3 * lane:.1f} ms of a core, a message {1e6 * message:.0f} µs, a megabyte {1e12 * byte:.0f} µs."
    cluster, far = Cluster(), ["| model | GPUs | flat | two levels | butterfly | step | kept, elastic | kept, restart |", "|---" * 8 + "|"]
    for job in JOBS:
        for ranks in (8, 64, 256, 1024, 4096):
            each = [1e3 * reduction(job, ranks, name, cluster) for name in ("flat", "hierarchical", "butterfly")]
            whole = step(job, ranks, "hierarchical", cluster)
            shares = [100 * kept(job, ranks, whole, cluster, elastic) for elastic in (True, False)]
            row = [job.name, f"{ranks:,}", *(f"{one:.2f}" for one in each), f"{1e3 * whole:.0f}", *(f"{one:.2f} %" for one in shares)]
            far.append(f"| {' | '.join(row)} |")
    return {"measured": "\n".join(lines) + f"\n\n{fitted}", "borrowed": "\n".join(far)}


def draw(measured: dict[str, dict[str, list[float]]]) -> None:
    """The same as a picture: on the left what is measured, on the right what follows from borrowed figures."""
    matplotlib.use("svg")
    # The same bytes from the same figures.
    matplotlib.rcParams["svg.hashsalt"] = "lockstep"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    costs, worlds = fit(measured), sorted((*FITTED, HELD_OUT))
    for name in ALGORITHMS:
        medians = [1e3 * statistics.median(measured[str(ranks)][name]) for ranks in worlds]
        left.plot(worlds, medians, "o", label=f"{name}, measured")
    left.plot(worlds, [1e3 * float(np.dot(shares_of(ranks, ALGORITHMS[0]), costs)) for ranks in worlds], "-", color="grey", label="model")
    left.axvline(HELD_OUT, color="grey", linestyle=":", linewidth=0.8)
    left.annotate("not fitted", (HELD_OUT, 0), rotation=90, color="grey", ha="right")
    left.set(title="Two CPU cores, LeNet: measured", xlabel="ranks", ylabel="a step, ms", xticks=worlds, ylim=(0, None))
    counts, cluster = [2**power for power in range(3, 13)], Cluster()
    for name in ("flat", "hierarchical", "butterfly"):
        right.plot(counts, [1e3 * step(JOBS[1], ranks, name, cluster) for ranks in counts], "-", label=name)
    right.set(title="H100s, ResNet-50: from borrowed figures", xlabel="GPUs", ylabel="a step, ms", xscale="log", ylim=(0, None))
    right.set_xticks([8, 64, 512, 4096], ["8", "64", "512", "4,096"])
    right.minorticks_off()
    for one in (left, right):
        one.legend(frameon=False)
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("--kept", action="store_true", help="take what bench/scale.json has, and measure nothing")
    wanted = parser.parse_args()
    measured = json.loads(KEPT.read_text()) if wanted.kept else measure(wanted.pairs, wanted.seconds)
    for name, text in tables(measured).items():
        print(f"{name}:\n{text}\n")
    if wanted.publish:
        KEPT.write_text(json.dumps(measured, indent=2) + "\n")
        PAGE.write_text(filled(PAGE.read_text(), tables(measured)))
        draw(measured)


if __name__ == "__main__":
    main()
