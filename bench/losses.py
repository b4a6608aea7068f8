"""A lost rank under dist.elastic, against the restart of all from a checkpoint, and what elastic costs while none is lost."""

import signal
import socket
import statistics
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.recovery import Training, rank, wait_for

RANKS, BATCH = 4, 64
# A lane takes its time asleep, so that four ranks on two cores are as fast as on four; local rank 3 becomes slow when it is told to.
SLOW_MODEL = """
import os
import time
from pathlib import Path

from torch import nn

class Slow(nn.Module):
    def forward(self, images):
        slow = os.environ.get("LOCAL_RANK") == "3" and Path(os.environ["SLOW_FILE"]).exists()
        time.sleep(0.04 if slow else 0.02)
        return images

def build(channels: int, side: int, num_classes: int) -> nn.Module:
    return nn.Sequential(Slow(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(channels * (side // 4) ** 2, num_classes))
"""
# A step's time is the median of so many.
STEPS = 400


def training(folder: Path, elastic: bool, epochs: int, ranks: int) -> Training:
    """LeNet in four lanes, 256 images a step."""
    return Training(folder / f"{elastic}-{ranks}", epochs, batch=RANKS * BATCH // ranks, world_size=ranks, lanes=RANKS, elastic=elastic)


def lost(folder: Path, count: int) -> dict[str, list[float]]:
    """Seconds from SIGKILL of one of four ranks to the next finished step, of local rank 0, which is not killed, in turn."""
    ways = {"elastic": training(folder, True, 20, RANKS), "without": training(folder, False, 20, RANKS)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(count):
        for name, one in ways.items():
            process = one.start()
            wait_for(one, 60)
            victim = rank(process, 1 + number % (RANKS - 1))
            killed_at = time.monotonic()
            victim.send_signal(signal.SIGKILL)
            found[name].append(next_step(one, killed_at) - killed_at)
            process.terminate()
            process.wait()
    return found


def machine_lost(folder: Path, count: int) -> dict[str, list[float]]:
    """Seconds from the end of one of two machines, all of its processes at once, to the leader's next finished step; a spare is there."""
    found: dict[str, list[float]] = {"elastic": [], "without": []}
    for number in range(count):
        for name in list(found)[:: 1 if number % 2 else -1]:
            machines = [
                Training(folder / f"{name}-{one}", 40, batch=64, world_size=RANKS, nodes=2, lanes=RANKS, elastic=name == "elastic")
                for one in ("leader", "worker", "spare")
            ]
            port = free_port()
            processes = [machines[0].leads(port), *(one.start("join", f"127.0.0.1:{port}") for one in machines[1:])]
            wait_for(machines[0], 60)
            victim = next(one for one in map(of, processes[1:]) if any("train_rank" in " ".join(rank.cmdline()) for rank in one))
            killed_at = time.monotonic()
            for one in victim:
                one.kill()
            found[name].append(next_step(machines[0], killed_at) - killed_at)
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()
    return found


def of(machine: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """All processes of a machine."""
    return [psutil.Process(machine.pid), *psutil.Process(machine.pid).children(recursive=True)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def next_step(one: Training, killed_at: float) -> float:
    """When the step was done that had to be done again, after the longest gap: one that was under way may end without the lost rank."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        times = [at for at, _ in one.steps()]
        around = [at for at in times if at <= killed_at][-1:] + [at for at in times if at > killed_at][:3]
        if len(around) == 4:
            return max(pairwise(around), key=lambda gap: gap[1] - gap[0])[1]
        time.sleep(0.005)
    raise AssertionError("no step")


def undisturbed(folder: Path, count: int) -> dict[str, list[float]]:
    """The seconds of a step on two ranks of which none is lost, in turn."""
    ways = {"elastic": training(folder, True, 3, 2), "without": training(folder, False, 3, 2)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(count):
        for name, one in list(ways.items())[:: 1 if number % 2 else -1]:
            process = one.start()
            wait_for(one, 20 + STEPS)
            found[name].append(statistics.median(one.gaps(per_epoch=54000 // (RANKS * BATCH))[:STEPS]))
            process.terminate()
            process.wait()
    return found


def slowed(folder: Path, count: int) -> dict[str, list[float]]:
    """The seconds of a step on four ranks of which one has become half as fast, with lanes that move and without, in turn."""
    found: dict[str, list[float]] = {"elastic": [], "without": []}
    settings: dict[str, Any] = {"lanes": 16, "elastic": True}
    ways = {name: Training(folder / name, 20, 6000, 24, 200, world_size=RANKS, **settings) for name in found}
    for name, one in ways.items():
        (one.folder / "mine.py").write_text(SLOW_MODEL)
        values = yaml.safe_load(one.params.read_text()) | {"model": {"name": "mine.py:build"}, "tracking": {"log_every_steps": 8}}
        values["dist"]["lanes_per_rank"] = "auto" if name == "elastic" else None
        one.params.write_text(yaml.safe_dump(values))
    for number in range(count):
        for name, one in list(ways.items())[:: 1 if number % 2 else -1]:
            slow = one.folder / "slow"
            slow.unlink(missing_ok=True)
            process = one.start(SLOW_FILE=str(slow))
            wait_for(one, 20)
            slow.touch()
            # The lanes have moved by then.
            wait_for(one, 120)
            found[name].append(statistics.median(after - before for before, after in pairwise(at for at, _ in one.steps()[60:])))
            process.terminate()
            process.wait()
    return found
