"""What every user pays before the steps: a `dvc repro` with nothing to do, the time to the first figure, a rank's memory."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from pipeline.tracking.journal import read

ROOT = Path(__file__).parents[1]


EMPTY = """
stages:
  first: {cmd: touch a, outs: [a]}
  second: {cmd: touch b, deps: [a], outs: [b]}
  third: {cmd: touch c, deps: [b], outs: [c]}
"""


def no_ops(count: int) -> dict[str, list[float]]:
    """Seconds of a `dvc repro` that finds everything up to date, in a clone with small data and in a pipeline of three empty stages."""
    with tempfile.TemporaryDirectory() as scratch:
        clone, empty = Path(scratch) / "clone", Path(scratch) / "empty"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        params = clone / "params.yaml"
        params.write_text(params.read_text().replace("name: fashion-mnist", "name: synthetic:1200").replace("epochs: 10", "epochs: 1"))
        empty.mkdir()
        (empty / "dvc.yaml").write_text(EMPTY)
        subprocess.run(["git", "init", "-q"], cwd=empty, check=True)
        dvc(empty, "init", "-q")
        # As in the clone.
        dvc(empty, "config", "core.analytics", "false")
        found: dict[str, list[float]] = {"dvc repro with nothing to do": [], "of three empty stages": []}
        for number in range(1 + count):
            for name, folder in zip(found, (clone, empty), strict=True):
                seconds = dvc(folder, "repro")
                # The first one did the work.
                found[name] += [seconds] if number else []
        return found


def dvc(folder: Path, *words: str) -> float:
    """Run DVC as a user does; returns its seconds."""
    bin_folder = Path(sys.executable).parent
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MLFLOW_"))}
    variables["PATH"] = f"{bin_folder}:{variables['PATH']}"
    started_at = time.monotonic()
    subprocess.run([str(bin_folder / "dvc"), *words], cwd=folder, env=variables, check=True, capture_output=True)
    return time.monotonic() - started_at


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
