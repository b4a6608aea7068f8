"""A torchrun job on a GPU that loses a rank, and the variables that choose kernels."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from pipeline.hardware.environment import CPU_SWITCHES, GPU_SWITCHES, for_ranks
from pipeline.job import Job
from pipeline.tracking.journal import last, read
from tests.kit.devices import GPU, ONE_GPU, gpu
from tests.kit.experiment import ROOT, make_job
from tests.ranks.test_bits import trained
from tests.unit.hardware.test_machine import detected

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
# Long enough to be hurt: 500 steps.
SHAPE: dict[str, Any] = {
    "data": {"name": "synthetic:1320"},
    "train__epochs": 20,
    "checkpoint__every_steps": 50,
}


def job_on_gpu(folder: Path, run: str, size: int, epochs: int = 20) -> Job:
    values = SHAPE | {"train__epochs": epochs, "dist__world_size": size, "dist__batch_size_per_gpu": 48 // size}
    return make_job(folder, **values).model_copy(update={"run": folder / run, "device": GPU})


def wait_for_metrics(job: Job, count: int, process: "subprocess.Popen[str]") -> None:
    until = time.monotonic() + 240
    while not job.journal.exists() or sum(line["kind"] == "metrics" for line in read(job.journal)) < count:
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise AssertionError(process.communicate()[1])
        time.sleep(0.005)


@gpu("G8: after kill -9 of a rank torchrun starts the ranks again, and they end in the same bits")
def test_a_killed_rank_on_a_gpu_costs_no_bit(tmp_path: Path, run_ranks, record_property) -> None:
    ((expected, _),) = run_ranks(1, (trained, (job_on_gpu(tmp_path, "alone", 1), None)), device=GPU)[0]
    job = job_on_gpu(tmp_path, "killed", 2)
    job.run.mkdir()
    (job.run / "job.json").write_text(job.model_dump_json())
    words = [*TORCHRUN, "-m", "pipeline.training.train_rank", str(job.run / "job.json")]
    # Two ranks share a GPU here, and meet in host memory.
    variables = for_ranks(os.environ, 1) | ONE_GPU | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started_at = time.monotonic()
    process = subprocess.Popen(words, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_metrics(job, 1, process)
        cold_start = time.monotonic() - started_at
        wait_for_metrics(job, 100, process)
        before = sum(line["kind"] == "metrics" for line in read(job.journal))
        (rank,) = [one for one in psutil.Process(process.pid).children() if one.environ().get("RANK") == "1"]
        rank.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        # A step that was journaled before is not journaled again.
        wait_for_metrics(job, before + 5, process)
        record_property("seconds", {"cold start": round(cold_start, 2), "to a new step": round(time.monotonic() - killed_at, 2)})
        _, said = process.communicate(timeout=240)
    finally:
        # Its ranks end with it.
        process.kill()
    assert process.returncode == 0, said
    # Of the one that was killed, or of the other, which lost it.
    assert "failed (exitcode: " in said
    assert last(job.journal, "finished")["weights_sha256"] == expected


@gpu("G13: a variable that chooses kernels makes another kind of device or does not reach a rank")
def test_a_variable_that_chooses_kernels_changes_the_kind_of_device_or_nothing(tmp_path: Path, record_property) -> None:
    switches, kind = (GPU_SWITCHES, "gpus") if GPU == "cuda" else (CPU_SWITCHES, "cpu")
    here = detected()[kind]
    assert here
    for name in switches:
        assert detected(**{name: "1"})[kind] != here, name
    strange = {
        "CUBLASLT_WORKSPACE_SIZE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "PYTORCH_TUNABLEOP_ENABLED": "1",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "TORCH_BLAS_PREFER_CUBLASLT": "1",
        "TORCH_CUDNN_USE_HEURISTIC_MODE_B": "1",
    }
    digests = {
        name: digest_of(job_on_gpu(tmp_path, name, 1, epochs=2), variables)
        for name, variables in (
            ("plain", for_ranks(os.environ, 1)),
            ("strange", for_ranks(os.environ | strange, 1)),
            # What a torchrun by hand inherits, and the rank itself does not set.
            ("by hand", os.environ | strange),
        )
    }
    assert digests["plain"] == digests["strange"]
    # Whether they would have changed something is this GPU's affair.
    record_property("under a plain torchrun", "the same bits" if digests["by hand"] == digests["plain"] else "other bits")


def digest_of(job: Job, variables: dict[str, str]) -> str:
    """Train in a process that is started with these variables: torch and CUDA read some of them as they are loaded."""
    job.run.mkdir()
    (job.run / "job.json").write_text(job.model_dump_json())
    own = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [*TORCHRUN[:-2], "--nproc-per-node=1", "-m", "pipeline.training.train_rank", str(job.run / "job.json")]
    done = subprocess.run(words, cwd=ROOT, env=variables | own, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return last(job.journal, "finished")["weights_sha256"]
