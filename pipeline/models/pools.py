"""Adaptive pools to more than one pixel, as in AlexNet and VGG: they have no deterministic backward on GPUs."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from pipeline.config import ConfigError


@contextmanager
def deterministic_pools(model: nn.Module) -> Generator[None]:
    """Replace adaptive pools by equal ones, where the map that is passed through them within can be divided."""
    sizes: dict[nn.Module, tuple[int, ...]] = {}

    def note(pool: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes[pool] = tuple(inputs[0].shape[2:])

    pools = [(parent, name, pool) for parent in model.modules() for name, pool in parent.named_children() if is_adaptive(pool)]
    hooks = [pool.register_forward_pre_hook(note) for _, _, pool in pools]
    yield
    for hook in hooks:
        hook.remove()
    for parent, name, pool in pools:
        (height, width), (rows, columns) = sizes[pool], cast("tuple[int, int]", pool.output_size)
        if (height, width) == (rows, columns):
            setattr(parent, name, nn.Identity())
        elif height % rows == 0 and width % columns == 0:
            setattr(parent, name, nn.AvgPool2d((height // rows, width // columns)))


def is_adaptive(module: nn.Module) -> bool:
    """Return whether a module pools to more than one pixel; to one it takes a mean."""
    return isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size not in (1, (1, 1))


def check_backward(model: nn.Module, name: str, device: torch.device) -> None:
    """Raise ConfigError for a model that a GPU could not differentiate deterministically."""
    for module in model.modules():
        if device.type == "cuda" and is_adaptive(module):
            pool = f"AdaptiveAvgPool2d to {module.output_size} has no deterministic backward on GPUs"
            raise ConfigError(f"model.name: {name}: {pool}; set data.image_size (224 for torchvision's), or CUDA_VISIBLE_DEVICES= for CPUs")
