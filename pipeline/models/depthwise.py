"""Depthwise convolutions on CPUs: in bf16 oneDNN's backward of them takes several times as long as in fp32."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn


def train_in_fp32(model: nn.Module) -> None:
    """Let depthwise convolutions compute in fp32 under autocast, where gradients are wanted; the layers and their names stay."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1:
            module.forward = partial(_in_fp32, module.forward)


def _in_fp32(forward: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")):
        return forward(images)
    with torch.autocast("cpu", enabled=False):
        return forward(images.float())
