"""The catalogue of models: one module each, with `build(channels, side, num_classes) -> nn.Module`."""

import importlib
from typing import TYPE_CHECKING

from pipeline.config import ConfigError, unknown
from pipeline.models.torchvision_names import NAMES

if TYPE_CHECKING:
    from torch import nn

CATALOGUE = {
    "lenet": "pipeline.models.lenet",
    "mlp": "pipeline.models.mlp",
    "resnet18": "pipeline.models.resnet",
}
TORCHVISION = "torchvision:"
ZOO = "pipeline.models.zoo"


def check(name: str) -> None:
    """Raise ConfigError unless model.name can be built; imports no torch."""
    if name.startswith(TORCHVISION):
        known = [TORCHVISION + one for one in NAMES]
        if name not in known:
            raise unknown("model.name", name, known) if len(name) > len(TORCHVISION) else ConfigError("model.name: torchvision: which one?")
    elif name not in CATALOGUE:
        raise unknown("model.name", name, [*CATALOGUE, "torchvision:<name>"])


def module_of(name: str) -> str:
    """The module that builds the named model."""
    return ZOO if name.startswith(TORCHVISION) else CATALOGUE[name]


def build(name: str, channels: int, side: int, num_classes: int) -> "nn.Module":
    """Build the named model, from images [N, C, H, W] to logits [N, classes]; its weights come from torch's global generator."""
    module = importlib.import_module(module_of(name))
    if name.startswith(TORCHVISION):
        model: nn.Module = module.build(name.removeprefix(TORCHVISION), channels, side, num_classes)
    else:
        model = module.build(channels, side, num_classes)
    return model
