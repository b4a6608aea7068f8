"""Any classifier of torchvision, by name, on images of 1 or 3 channels."""

import torch
from torch import Tensor, nn
from torchvision import models

from pipeline.config import ConfigError


def build(name: str, channels: int, side: int, num_classes: int) -> nn.Module:
    """The named model without pretrained weights and without auxiliary heads."""
    # These two return a second output unless told not to, and warn unless told how to draw their weights.
    extra = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **extra)
    model = model if channels == 3 else Grey(model)
    try:
        with torch.inference_mode():
            model.eval()(torch.zeros(2, channels, side, side))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.name: {name} cannot take images of {side} pixels ({reason}); set data.image_size") from None
    return model.train()


class Grey(nn.Module):
    """A model of colour images, given grey ones."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images.expand(-1, 3, -1, -1))
        return logits
