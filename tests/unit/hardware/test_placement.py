"""Placement: resolved from what is asked for and what is here."""

import pytest

from pipeline.config import Config, MachineError
from pipeline.hardware.machine import Machine
from pipeline.hardware.placement import resolve
from tests.kit.experiment import settings

NO_GPU = Machine([], 0, "a cpu", True)
OLD_CPU = Machine([], 0, "an old cpu", False)
TWO_GPUS = Machine(["H200", "H200"], 90, "a cpu", True, 13000)
ONE_GPU = Machine(["H200"], 90, "a cpu", True, 13000)
OLD_GPUS = Machine(["T4", "T4"], 75, "a cpu", True, 13000)


def config(**changes) -> Config:
    return Config.model_validate(settings(**({"train__precision": "auto"} | changes)))


@pytest.mark.parametrize(
    ("machine", "changes", "expected"),
    [
        (NO_GPU, {}, ("cpu", "gloo", "bf16")),
        (OLD_CPU, {}, ("cpu", "gloo", "fp32")),
        (OLD_CPU, {"train__precision": "bf16"}, ("cpu", "gloo", "bf16")),
        (TWO_GPUS, {}, ("cuda", "nccl", "bf16")),
        (TWO_GPUS, {"dist__backend": "gloo"}, ("cuda", "gloo", "bf16")),
        (ONE_GPU, {}, ("cuda", "gloo", "bf16")),
        (OLD_GPUS, {}, ("cuda", "nccl", "fp32")),
    ],
)
def test_auto_is_what_the_machine_can_do(machine: Machine, changes, expected: tuple[str, str, str]) -> None:
    placement = resolve(config(**changes), machine)
    assert (placement.device, placement.backend, placement.precision) == expected


@pytest.mark.parametrize(
    ("machine", "part"),
    [
        (NO_GPU, r"needs GPUs.*set backend: gloo"),
        (ONE_GPU, r"2 ranks, 1 GPUs.*set world_size: 1"),
        (Machine(["A100", "H200"], 80, "a cpu", True, 13000), "several kinds"),
        (Machine(["V100", "V100"], 70, "a cpu", True, 13000), r"V100: CUDA 13 has no kernels.*CUDA_VISIBLE_DEVICES="),
        (Machine(["H200", "H200"], 90, "a cpu", True, 12040), r"can do CUDA 12\.4 and torch needs 13\.0"),
    ],
)
@pytest.mark.fault(24, "nccl without a GPU, more ranks than GPUs, GPUs of two kinds or too old, a driver too old")
def test_what_cannot_be_names_the_setting_that_works(machine: Machine, part: str) -> None:
    with pytest.raises(MachineError, match=part):
        resolve(config(dist__backend="nccl"), machine)
