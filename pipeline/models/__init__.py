"""The catalogue of models: one module each, with `build(channels, side, num_classes) -> nn.Module`."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import ConfigError, own_code, unknown
from pipeline.models.torchvision_names import NAMES

if TYPE_CHECKING:
    from torch import nn

    from pipeline.config.sections import Model

CATALOGUE = {
    "lenet": "pipeline.models.lenet",
    "mlp": "pipeline.models.mlp",
    "resnet18": "pipeline.models.resnet",
}
TORCHVISION = "torchvision:"
ZOO, OWN = "pipeline.models.zoo", "pipeline.models.own"


def check(name: str) -> None:
    """Raise ConfigError unless model.name can be built; imports no torch."""
    if name.startswith(TORCHVISION):
        known = [TORCHVISION + one for one in NAMES]
        if name not in known:
            raise unknown("model.name", name, known) if len(name) > len(TORCHVISION) else ConfigError("model.name: torchvision: which one?")
    elif name not in CATALOGUE and not own_code.is_own(name):
        known = [*CATALOGUE, "torchvision:<name>", "<file>.py:<function>"]
        if name in NAMES:
            raise ConfigError(f"model.name: {name!r} is unknown; did you mean {TORCHVISION}{name}?")
        raise unknown("model.name", name, known)


def check_frozen(frozen: list[str], strategy: str) -> None:
    """Raise ConfigError where a strategy trains all of a model."""
    if frozen and strategy not in ("allreduce", "ddp", "graphs"):
        raise ConfigError(f"model.frozen: {strategy} trains all of a model; set dist.strategy: ddp, or frozen: []")


def module_of(name: str) -> str:
    """The module that builds the named model."""
    return ZOO if name.startswith(TORCHVISION) else OWN if own_code.is_own(name) else CATALOGUE[name]


def of(settings: "Model", channels: int, side: int, num_classes: int) -> "nn.Module":
    """Build the model that the settings name."""
    if own_code.is_own(settings.name):
        model: nn.Module = importlib.import_module(OWN).build(settings, channels, side, num_classes)
        return model
    return build(settings.name, channels, side, num_classes)


def with_source(settings: "Model", root: Path) -> "Model":
    """The same with what the file of a model of the user's own holds; raises ConfigError for what cannot be built."""
    if settings.source is not None:
        return settings
    if not own_code.is_own(settings.name):
        if settings.options:
            raise ConfigError(f"model.options: {settings.name} takes none; they are for a model of your own, such as mine.py:build")
        return settings
    source = own_code.read("model.name", settings.name, root)
    own_code.check_options("model.options", settings.name, source, settings.options)
    return settings.model_copy(update={"source": source})


def build(name: str, channels: int, side: int, num_classes: int) -> "nn.Module":
    """Build the named model, from images [N, C, H, W] to logits [N, classes]; its weights come from torch's global generator."""
    module = importlib.import_module(module_of(name))
    if name.startswith(TORCHVISION):
        model: nn.Module = module.build(name.removeprefix(TORCHVISION), channels, side, num_classes)
    else:
        model = module.build(channels, side, num_classes)
    return model
