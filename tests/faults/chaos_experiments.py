"""The small experiments of the campaign, left alone or on a small disk of their own."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.faults.chaos_faults import MARK
from tests.kit.experiment import ROOT, clean_environment, settings

DISK = "120m"
GLOBAL_BATCH = 96
# Four seconds of steps or so, and a rate so low that the best epoch is not the first.
SLOW = {"train__learning_rate": 0.002, "checkpoint__every_steps": 8}
EXPERIMENTS = (
    {"data__name": "synthetic:4000", "train__epochs": 5, "model__name": "mlp", **SLOW},
    {"data__name": "synthetic:3000", "train__epochs": 4, "model__name": "lenet", **SLOW, "checkpoint__every_steps": 5},
    {
        "data__name": "synthetic:3000",
        "train__epochs": 6,
        "model__name": "mlp",
        "train__optimizer": "adamw",
        "train__momentum": None,
        **SLOW,
    },
)


def write_params(folder: Path, kind: int, world_size: int) -> None:
    """One of the experiments, on so many ranks."""
    values = settings(**EXPERIMENTS[kind], dist__world_size=world_size, dist__batch_size_per_gpu=GLOBAL_BATCH // world_size)
    values["data"] = {"name": values["data"]["name"]}
    (folder / "params.yaml").write_text(yaml.safe_dump(values))


def pipeline(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A command that nobody disturbs."""
    words = [sys.executable, "-m", "pipeline", command, "--params", str(folder / "params.yaml")]
    environment = clean_environment() | {MARK: str(folder)}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def reference(folder: Path, kind: int) -> Path:
    """One of the experiments left alone."""
    folder.mkdir()
    write_params(folder, kind, 2)
    for command in ("prepare", "train"):
        done = pipeline(folder, command)
        assert done.returncode == 0, done.stderr
    return folder


@contextlib.contextmanager
def disk(folder: Path, mounts: bool) -> Iterator[Path]:
    """A folder on a small disk of its own, where that can be had."""
    folder.mkdir()
    if mounts:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "chaos", str(folder)], check=True)
    try:
        yield folder
    finally:
        if mounts:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder)


def may_mount(folder: Path) -> bool:
    """Whether small disks can be had."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError), disk(folder / "try", os.geteuid() == 0):
        return os.geteuid() == 0
    return False
