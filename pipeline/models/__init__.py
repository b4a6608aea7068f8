"""The catalogue of models: one module each, with `build(channels, side, num_classes) -> nn.Module`."""

import importlib
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import ConfigError, unknown

if TYPE_CHECKING:
    from torch import nn

CATALOGUE = {
    "lenet": "pipeline.models.lenet",
    "mlp": "pipeline.models.mlp",
    "resnet18": "pipeline.models.resnet",
}
TORCHVISION = "torchvision:"


def check(name: str) -> None:
    """ConfigError unless model.name can be built; torch is not imported to find out."""
    if name.startswith(TORCHVISION):
        known = [TORCHVISION + one for one in _torchvision_names()]
        if name not in known:
            raise unknown("model.name", name, known) if len(name) > len(TORCHVISION) else ConfigError("model.name: torchvision: which one?")
    elif name not in CATALOGUE:
        raise unknown("model.name", name, [*CATALOGUE, "torchvision:<name>"])


def build(name: str, channels: int, side: int, num_classes: int) -> "nn.Module":
    """The named model with weights drawn from torch's global generator; it maps images [N, C, H, W] to logits [N, classes]."""
    if name.startswith(TORCHVISION):
        from pipeline.models import zoo

        return zoo.build(name.removeprefix(TORCHVISION), channels, side, num_classes)
    model: nn.Module = importlib.import_module(CATALOGUE[name]).build(channels, side, num_classes)
    return model


def _torchvision_names() -> list[str]:
    """The classifiers that torchvision registers, read from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ConfigError("model.name: torchvision is not installed; run: make setup")
    sources = (Path(spec.origin).parent / "models").glob("*.py")
    found = (re.findall(r"^@register_model\(\)\n(?:@.*\n)*def (\w+)", source.read_text(), re.MULTILINE) for source in sources)
    return sorted(name for names in found for name in names)
