"""Any classifier of torchvision, by name, on images of 1 or 3 channels."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torchvision import models

from pipeline.config import ConfigError


def build(name: str, channels: int, side: int, num_classes: int) -> nn.Module:
    """Build the named model without pretrained weights or auxiliary heads; raises ConfigError if the images are too small for it."""
    # These two have auxiliary outputs by default, and warn unless told how to initialize their weights.
    extra = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **extra)
    model = model if channels == 3 else Grey(model)
    try:
        with torch.inference_mode(), deterministic_pools(model):
            model.eval()(torch.zeros(2, channels, side, side))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.name: {name} cannot take images of {side} pixels ({reason}); set data.image_size") from None
    return model.train()


@contextmanager
def deterministic_pools(model: nn.Module) -> Generator[None]:
    """Put equal pools in the place of adaptive ones, which have no deterministic backward on GPUs, where a map passed within divides."""
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
    """Return whether a module pools to more than one pixel, as AlexNet's and VGG's do; to one it takes a mean."""
    return isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size not in (1, (1, 1))


class Grey(nn.Module):
    """A model of colour images, for grey ones."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images.expand(-1, 3, -1, -1))
        return logits
