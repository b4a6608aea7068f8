"""Gradients of convolutions' weights that oneDNN leaves uncomputed in bf16 on CPUs: ours has none."""

import copy
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.hardware import machine
from pipeline.models.cpu_layers import replace_kernels

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def fast_fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "fast_fp32_products", lambda: True)


class Scaled(nn.Conv2d):
    """A class of its own, as those with standardized weights."""

    def forward(self, images: Tensor) -> Tensor:  # pyright: ignore
        return self._conv_forward(input=images, weight=self.weight * 2, bias=self.bias)


OTHERS: list[nn.Conv2d] = [
    nn.Conv2d(16, 32, 3, 2, padding=2, dilation=2),
    nn.Conv2d(16, 32, 3, 2, padding=1, groups=2),
    nn.Conv2d(16, 16, 5, padding=2, groups=16),
    nn.Conv2d(16, 32, 7, padding="same"),
    nn.Conv2d(16, 32, 3, 2, padding=1, padding_mode="replicate"),
]
PLAIN = nn.Conv2d(16, 32, 3, 2, padding=1)
WITH_ONE_STRIDE = nn.Conv2d(16, 32, 3, padding=1)
WITH_ONE_STRIDE.stride = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("layer", [PLAIN, copy.deepcopy(PLAIN).eval(), WITH_ONE_STRIDE, Scaled(16, 32, 3, 2, padding=1), *OTHERS], ids=str)
def test_every_gradient_in_bf16_is_computed_where_windows_reach_beyond_maps(layer: nn.Conv2d) -> None:
    """torch's own holds numbers that nothing computed, on maps of one pixel in most calls."""
    torch.manual_seed(6)
    layer = copy.deepcopy(layer).to(memory_format=torch.channels_last)  # pyright: ignore
    replace_kernels(layer)
    for side in (1, 2):
        images = torch.randn(6, 16, side, side)
        full = torch.autograd.grad(layer(images).square().sum(), layer.weight)[0]
        for _ in range(10):
            with torch.autocast("cpu", torch.bfloat16):
                found = layer(images)
            assert found.dtype == torch.bfloat16
            own = torch.autograd.grad(found.float().square().sum(), layer.weight)[0]
            assert (own - full).norm() < 0.02 * full.norm()


@pytest.mark.parametrize("layer", [one for one in OTHERS if one.padding != "same"], ids=str)
def test_other_convolutions_keep_torchs_bits_in_fp32(layer: nn.Conv2d) -> None:
    ours, images = copy.deepcopy(layer), torch.randn(5, 16, 3, 3)
    replace_kernels(ours)
    found, expected = (torch.autograd.grad(one(images).square().sum(), one.weight)[0] for one in (ours, layer))
    assert torch.equal(found, expected)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_nothing_is_left_uncomputed() -> None:
    words = [sys.executable, "-m", "tests.kit.uncomputed"]
    done = subprocess.run(words, env=os.environ | {"MALLOC_PERTURB_": "128"}, capture_output=True, text=True, cwd=ROOT)
    flags = Path("/proc/cpuinfo").read_text()
    counted = done.stdout.rpartition("\n")[0].rpartition("\n")[2].startswith("wrong of")
    if done.returncode and counted and ("amx_bf16" in flags or "avx512_bf16" not in flags):
        pytest.xfail(f"kernels of another kind of CPU than was examined: {done.stdout}{done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("ours 0\n"), done.stdout
