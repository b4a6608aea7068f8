"""What a GPU must show, in parts of ten minutes at most, with the results as JSON: `python bench/gpu.py [PART…]`.

It needs torch, torchvision, pytest, pytest-timeout, hypothesis, psutil, PyYAML, safetensors and pydantic; no MLflow, DVC or Docker.
`--rehearse` runs all of it on a CPU.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench import outcomes  # noqa: E402
from bench.arguments import add_parts  # noqa: E402
from bench.jobs import torchrun  # noqa: E402
from pipeline.hardware import machine  # noqa: E402

RANKS = "tests/ranks/"
# Tests that are marked `gpu`, by what they take.
TESTS = {
    "rest": [
        RANKS + "test_gpu.py",
        RANKS + "test_figures.py",
        RANKS + "test_divergence.py",
        RANKS + "test_gpu_jobs.py",
        "-k",
        "not every_model",
    ],
    "strategies": [RANKS + "test_strategies.py"],
    "twice": [RANKS + "test_bits.py", "-k", "gives_the_same_bits_twice or graphs"],
    "bits": [RANKS + "test_bits.py", "-k", "on_any_ranks"],
    "races": [RANKS + "test_gpu_races.py"],
    "models": [RANKS + "test_gpu.py", "-k", "every_model"],
}
STEPS = {"lenet": ("lenet", 7, "2"), "resnet18": ("resnet18", 7, "3")}
LIMIT_SECONDS = 590


def main() -> None:
    parser = argparse.ArgumentParser(description="What a GPU must show, in parts of ten minutes at most.")
    add_parts(parser, [*TESTS, *STEPS])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results.json"), help="a file for the results; parts are added (gpu-results.json)"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, where it proves nothing but that it runs")
    wanted = parser.parse_args()
    if not wanted.rehearse and not torch.cuda.is_available():
        sys.exit("bench/gpu.py: torch sees no GPU here; --rehearse runs it on the CPU")
    results = json.loads(wanted.out.read_text()) if wanted.out.exists() else {}
    failed = False
    for part in wanted.parts:
        started_at = time.monotonic()
        found = tests(part, wanted) if part in TESTS else steps(part, wanted)
        result = {"part": part, "seconds": round(time.monotonic() - started_at, 1), "machine": facts(wanted.rehearse)} | found
        results[part] = result
        wanted.out.write_text(json.dumps(results, indent=2) + "\n")
        failed |= show(result)
    sys.exit(failed)


def facts(rehearsal: bool) -> dict[str, Any]:
    """Where this ran."""
    # In a process of its own: here torch may have opened the driver already.
    timed = "import time; from pipeline.hardware import machine; at = time.monotonic(); machine.detect(); print(time.monotonic() - at)"
    seconds = float(subprocess.run([sys.executable, "-c", timed], cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    here = machine.detect()
    found: dict[str, Any] = {"seconds to detect": round(seconds, 3), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "gpus": here.gpus, "cpu": here.cpu, "rehearsal": rehearsal}
    if not rehearsal:
        found |= {"cudnn": torch.backends.cudnn.version(), "nccl": torch.cuda.nccl.version(), "driver": here.driver}
    return found


def variables(wanted: argparse.Namespace) -> dict[str, str]:
    """The environment of a part."""
    older = [] if tuple(int(one) for one in torch.__version__.split(".")[:2]) >= (2, 13) else [str(ROOT / "bench" / "older_torch")]
    paths = [*older, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return (
        os.environ
        | {"PYTHONPATH": os.pathsep.join(paths)}
        | ({"LOCKSTEP_GPU": "cpu", "CUDA_VISIBLE_DEVICES": ""} if wanted.rehearse else {})
    )


def tests(part: str, wanted: argparse.Namespace) -> dict[str, Any]:
    """Run the tests of a part; what each proves, and how it ended."""
    report = Path(tempfile.mkdtemp()) / "outcomes"
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not docker", "-W", "default", "-p", "bench.outcomes", *TESTS[part]]
    environment = variables(wanted) | {outcomes.FILE: str(report)}
    with (report.with_suffix(".log")).open("w+") as log:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | str = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = f"not done after {LIMIT_SECONDS} s"
        # With its ranks.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        said = log.read()[-4000:]
    # A last line without an end was cut off.
    found = [json.loads(line) for line in report.read_text().split("\n")[:-1]] if report.exists() else []
    shutil.rmtree(report.parent)
    well = code in (0, 1) and found
    return {"tests": found} | ({} if well else {"error": f"pytest ended with {code} and {len(found)} tests", "output": said})


def steps(part: str, wanted: argparse.Namespace) -> dict[str, Any]:
    """Figures of the product's steps and of hand-written loops, in turn."""
    model, rounds, seconds = STEPS[part] if not wanted.rehearse else (part, 1, "0.3")
    os.environ |= variables(wanted)
    started_at = time.monotonic()
    speeds: dict[str, list[float]] = defaultdict(list)
    others: dict[str, Any] = {}
    for index in range(rounds):
        for side in ("product", "by hand") if index % 2 else ("by hand", "product"):
            try:
                left = LIMIT_SECONDS - (time.monotonic() - started_at)
                found = json.loads(torchrun("gpu_steps.py", model, side, seconds, ranks=1, limit_seconds=left).splitlines()[-1])
            except subprocess.CalledProcessError as error:
                return {"error": f"{side} failed", "output": error.stderr[-4000:]}
            except subprocess.TimeoutExpired:
                if index == 0:
                    return {"error": f"not done after {LIMIT_SECONDS} s", "output": ""}
                # What whole rounds have shown stands.
                return measured({name: values[:index] for name, values in speeds.items()}, others)
            for name, speed in found.pop("images_per_second").items():
                speeds[name].append(speed)
            others[side] = found
    return measured(speeds, others)


def measured(speeds: dict[str, list[float]], others: dict[str, Any]) -> dict[str, Any]:
    """Every speed, and its ratio to the loops by hand of the same round."""
    ratios = {name: [one / other for one, other in zip(values, speeds["by hand"], strict=True)] for name, values in speeds.items()}
    tables = {"images_per_second": speeds, "to by hand": ratios}
    return {"figures": {title: {name: summary(values) for name, values in table.items()} for title, table in tables.items()} | others}


def summary(values: list[float]) -> dict[str, float]:
    """Median, extremes and number."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values), "n": len(values)}


def show(result: dict[str, Any]) -> bool:
    """Print what a part proved and what not; returns True if something failed."""
    rehearsed = "rehearsed on a CPU: " if result["machine"]["rehearsal"] else ""
    print(f"\n{result['part']}: {result['seconds']:.0f} s, {rehearsed}{', '.join(result['machine']['gpus']) or result['machine']['cpu']}")
    for one in result.get("tests", []):
        proven = "runs" if rehearsed else "recorded" if "digests" in one["recorded"] else "proven"
        word = {"passed": proven, "skipped": "not shown"}.get(one["outcome"], "FAILED")
        print(f"  {word:<10} {one['proves'] or one['test']}", *[f"({one['said'].splitlines()[0][:200]})" for _ in [0] if one["said"]])
    if "error" in result:
        print(f"  FAILED     {result['error']}\n{result['output']}")
    if "figures" in result:
        print(json.dumps(result["figures"], indent=2))
    return "error" in result or any(one["outcome"] not in ("passed", "skipped") for one in result.get("tests", []))


if __name__ == "__main__":
    main()
