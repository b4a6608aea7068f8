"""What a machine says that it is, with a library in the place of the GPUs' driver."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.hardware.environment import CPU_SWITCHES, GPU_SWITCHES
from pipeline.hardware.machine import INSTRUCTION_SETS, avx2_at_most, fast_bf16, fast_fp32_products
from tests.kit.driver import driver
from tests.kit.experiment import ROOT, Experiment

DETECT = """
import dataclasses, json
from pipeline.config import MachineError
from pipeline.hardware.machine import detect
try:
    print(json.dumps(dataclasses.asdict(detect())))
except MachineError as error:
    print(json.dumps(str(error)))
"""


def detected(**variables: str) -> Any:
    chosen = (*CPU_SWITCHES, *GPU_SWITCHES, "CUDA_VISIBLE_DEVICES")
    clean = {name: value for name, value in os.environ.items() if name not in chosen}
    said = subprocess.run([sys.executable, "-c", DETECT], cwd=ROOT, env=clean | variables, capture_output=True, text=True, check=True)
    return json.loads(said.stdout)


def test_the_kind_of_a_gpu_is_its_name_size_and_capability_and_what_its_host_draws_with(tmp_path: Path) -> None:
    here = detected(**driver(tmp_path / "h200"))
    assert len(here["gpus"]) == 2
    assert (here["capability"], here["driver"]) == (90, 13000)
    assert here["uuids"] == ["11" * 16, "12" * 16]
    # An old driver knows none, and is named as old.
    assert detected(**driver(tmp_path / "old", UUID=0))["uuids"] == []
    (kind,) = set(here["gpus"])
    assert kind.startswith(f"NVIDIA H200 (132 SMs, capability 9.0) on {platform.machine()}")
    others = [
        detected(**driver(tmp_path / "part", SMS=60)),
        detected(**driver(tmp_path / "other", CAPABILITY=103)),
        detected(**driver(tmp_path / "drawing"), ATEN_CPU_CAPABILITY="default"),
        *(detected(**driver(tmp_path / "switched"), **{name: "1"}) for name in GPU_SWITCHES),
    ]
    assert len({kind, *(other["gpus"][0] for other in others)}) == 4 + len(GPU_SWITCHES)
    # What only a GPU reads is no part of a CPU's kind.
    assert {other["cpu"] for other in others[3:]} == {here["cpu"]}
    assert others[2]["cpu"] != here["cpu"]


def test_a_switch_that_chooses_other_kernels_is_another_kind_of_cpu() -> None:
    kinds = [detected()["cpu"], *(detected(**{name: "AVX2"})["cpu"] for name in CPU_SWITCHES)]
    assert len(set(kinds)) == 1 + len(CPU_SWITCHES)


@pytest.mark.parametrize(
    ("flags", "maker", "fast"),
    [
        ({"avx512f", "avx512_bf16", "amx_bf16"}, "GenuineIntel", True),
        ({"avx512f", "avx512_bf16"}, "GenuineIntel", False),
        ({"avx512f", "avx512_bf16"}, "AuthenticAMD", True),
        ({"avx2"}, "AuthenticAMD", False),
    ],
)
def test_bf16_is_for_cpus_that_gain_by_it(flags: set[str], maker: str, fast: bool) -> None:
    assert fast_bf16(flags, [maker]) == fast


@pytest.mark.parametrize(
    ("flags", "maker", "fast"),
    [
        ("avx2 avx512f avx_vnni", "GenuineIntel", True),
        ("avx2 avx512f avx512_bf16 avx_vnni", "AuthenticAMD", False),
        ("avx2 avx512f avx512_bf16", "AuthenticAMD", True),
        ("avx2", "AuthenticAMD", True),
    ],
)
def test_products_in_fp32_are_slow_on_amds_with_avx512_and_avx_vnni(flags: str, maker: str, fast: bool, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"vendor_id\t: {maker}\nflags\t\t: fpu {flags} sse\n")
    assert fast_fp32_products(info) == fast
    # Or machines of one kind would compute otherwise.
    assert all(flag.startswith(INSTRUCTION_SETS) for flag in flags.split())


@pytest.mark.parametrize(("flags", "so"), [("avx2 fma", True), ("avx2 avx512f", False), ("asimd", False)])
def test_cpus_with_avx2_and_nothing_wider(flags: str, so: bool, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"flags\t\t: fpu {flags} sse\n")
    assert avx2_at_most(info) == so


@pytest.mark.parametrize("code", [34, 100])
def test_a_driver_without_a_gpu_and_a_stub_are_no_gpu(tmp_path: Path, code: int) -> None:
    assert detected(**driver(tmp_path, INIT=code))["gpus"] == []


@pytest.mark.fault(37, "a driver that does not start: fabric manager down, versions that differ, an unknown error")
@pytest.mark.parametrize("changes", [{"INIT": 802}, {"INIT": 803}, {"INIT": 999}, {"ATTRIBUTES": 46}])
def test_a_broken_driver_is_an_error_and_never_the_cpu_in_silence(tmp_path: Path, changes: dict[str, int]) -> None:
    broken = driver(tmp_path, **changes)
    (code,) = changes.values()
    said = detected(**broken)
    assert isinstance(said, str), said
    assert f"failed with {code}, the reason" in said
    assert "CUDA_VISIBLE_DEVICES=" in said
    # Who wants CPUs says so.
    assert detected(**broken | {"CUDA_VISIBLE_DEVICES": ""})["gpus"] == []


@pytest.mark.fault(37, "train and doctor with a broken driver")
def test_a_broken_driver_ends_a_training_with_4_and_doctor_names_it(experiment: Experiment, tmp_path: Path) -> None:
    broken = driver(tmp_path / "driver", INIT=803)
    experiment.run("prepare")
    for command in ("train", "doctor"):
        said = experiment.run(command, expect=4, **broken)
        assert "the GPU's driver does not work (cuInit failed with 803, the reason); see nvidia-smi" in said
        assert "Traceback" not in said
    assert not (experiment.folder / "runs").exists()
