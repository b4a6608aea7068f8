"""The memory order of weights, where who holds them takes plain order alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def keep_layouts(model: nn.Module) -> None:
    """Let modules go on to compute with channels-last weights: other kernels, and other sums, would round differently."""

    def in_order(own: dict[str, Any], names: list[str], forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        plain = {name: own[name] for name in names}
        own.update({name: one.to(memory_format=torch.channels_last) for name, one in plain.items()})
        try:
            return forward(*inputs, **named)
        finally:
            own.update(plain)

    modules: list[Any] = list(model.modules())
    for module in modules:
        own = {name: one for name, one in module._parameters.items() if one is not None and one.ndim == 4}
        # By strides: with one channel, or one pixel, a weight is contiguous in both orders.
        names = [name for name, one in own.items() if one.stride() != torch.empty(one.shape, device="meta").stride()]
        if names:
            module.forward = partial(in_order, module._parameters, names, module.forward)
