"""Any classifier of torchvision, by name, on images of 1 or 3 channels."""

import torch
from torch import Tensor, nn
from torchvision import models

from pipeline.config import ConfigError
from pipeline.models.pools import deterministic_pools


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


class Grey(nn.Module):
    """A model of colour images, for grey ones."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images.expand(-1, 3, -1, -1))
        return logits
