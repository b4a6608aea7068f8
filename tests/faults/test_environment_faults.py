"""A stranger's environment, and memory that was too short for a kernel: the same bits and endings, or an error, never others in silence."""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.kit.experiment import LONGER, ROOT, Experiment, clean_environment
from tests.kit.trainings import same_figures, status

Note = Callable[[str, object], None]
# What other programs, schedulers and habits leave behind; all of it changes how torch, torchrun or Python work.
VARIABLES = {
    "LOGLEVEL": "debug",
    "MASTER_ADDR": "203.0.113.7",
    "MASTER_PORT": "1",
    "RANK": "5",
    "LOCAL_RANK": "5",
    "WORLD_SIZE": "64",
    "TORCHELASTIC_RESTART_COUNT": "7",
    "TORCHELASTIC_RUN_ID": "another's",
    "TORCHELASTIC_ERROR_FILE": "/nowhere/error.json",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_LOGS": "+all",
    "OMP_NUM_THREADS": "7",
    "OMP_DYNAMIC": "TRUE",
    "OMP_THREAD_LIMIT": "1",
    "MKL_NUM_THREADS": "5",
    "MKL_VERBOSE": "1",
    "ONEDNN_VERBOSE": "1",
    "PYTHONHASHSEED": "42",
    "PYTHONOPTIMIZE": "2",
    "PYTHONSTARTUP": "/nowhere/startup.py",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "always",
}
STRANGERS = {
    "variables": VARIABLES,
    "a C locale, a HOME that cannot be written, 256 files": {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "HOME": "/proc"},
    "no HOME": {"HOME": None},
}


def train(experiment: Experiment, changes: dict[str, str | None], files: int | None = None) -> tuple[int, list[str]]:
    """The exit code and the lines of a training, without what differs between any two runs."""
    environment = {name: value for name, value in (clean_environment() | changes).items() if value is not None}
    limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None
    command = [sys.executable, "-m", "pipeline", "train", "--params", str(experiment.params)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280, preexec_fn=limit
    )
    said = done.stdout.decode().replace(str(experiment.folder), "FOLDER")
    return done.returncode, [
        re.sub(r"[0-9a-f]{32}|[\d.,:]+ (images/s|s\b)|\d+ images/s|\d\d:\d\d(:\d\d)?", "…", line)
        for line in said.splitlines()
        # How long MLflow takes is another matter.
        if not line.startswith("MLflow is still receiving")
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.fault(31, "LOGLEVEL, TORCH_*, TORCHELASTIC_*, OMP_*, PYTHON*, a C locale, no HOME, one that cannot be written, 256 files")
def test_a_strangers_environment_changes_no_bit_no_ending_and_no_message(
    tmp_path_factory: pytest.TempPathFactory, record_property: Note
) -> None:
    def ended(name: str, changes: dict[str, str | None], **settings: object) -> tuple[Experiment, int, list[str]]:
        experiment = Experiment(tmp_path_factory.mktemp(name.split()[0].strip(","))).set(**settings)
        experiment.run("prepare")
        return experiment, *train(experiment, changes, 256 if "256" in name else None)

    diverging = {"train__learning_rate": 1e6}
    plain, code, said = ended("plain", {})
    _, bad_code, bad_said = ended("diverging", {}, **diverging)
    assert (code, bad_code) == (0, 5), [*said, *bad_said]
    for name, changes in STRANGERS.items():
        experiment, *ending = ended(name, dict(changes))
        assert ending == [code, said], name
        same_figures(experiment, plain)
    _, *ending = ended("variables", dict(VARIABLES), **diverging)
    assert ending == [bad_code, bad_said]
    record_property("happened", "the same bits, exit codes and lines")


@pytest.mark.slow
@pytest.mark.fault(37, "an allocation on the GPU that failed without a word (its count is set in one rank; this machine may have no GPU)")
def test_memory_too_short_for_a_kernel_ends_with_4_and_keeps_nothing_of_it(experiment: Experiment, record_property: Note) -> None:
    experiment.set(**LONGER | {"checkpoint__every_steps": 5}).run("prepare")
    command = [sys.executable, "-m", "tests.kit.faulty", "train", "--params", str(experiment.params)]
    # Just before a checkpoint, in a step that logs nothing: rank 0 must not save what rank 1 finds out.
    environment = clean_environment() | {"FAULT": "short:1:14"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == 4, done.stdout
    assert "the GPU's memory was too short for a kernel's workspace" in done.stdout
    assert "starting again" not in done.stdout
    assert max(line["step"] for line in experiment.journal("metrics")) == 14
    assert status(experiment)["rank"] == 1
    assert sorted(path.name for path in experiment.run_folder.glob("checkpoints/step-*"))[-1] == "step-00000010.safetensors"
    record_property("happened", "exit 4 with rank, cause and cure; the newest checkpoint is from before it")


def test_a_rank_computes_products_in_full_fp32_on_every_device_and_torch_can_still_export() -> None:
    code = (
        "import torch; from pipeline.training.train_rank import fix_bits\n"
        "fix_bits(1)\n"
        "b = torch.backends; parts = (b, b.cuda.matmul, b.cudnn, b.cudnn.conv, b.cudnn.rnn, b.mkldnn, b.mkldnn.matmul, b.mkldnn.conv)\n"
        "print({one.fp32_precision for one in parts}, b.cuda.matmul.allow_bf16_reduced_precision_reduction, b.cudnn.benchmark)\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CUBLAS")}
    code += (
        "torch.export.export(torch.nn.Conv2d(1, 2, 3), (torch.zeros(1, 1, 8, 8),)); import os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean, capture_output=True, text=True, check=True).stdout
    assert said.split("\n")[:2] == ["{'ieee'} False False", ":4096:8"]
