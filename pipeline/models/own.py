"""A model that a file beside params.yaml builds."""

import copy
import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from pipeline import own_code
from pipeline.config import ConfigError

if TYPE_CHECKING:
    from pipeline.sections import Model


def build(settings: "Model", channels: int, side: int, num_classes: int) -> nn.Module:
    """Call the function, and try what it returns on two images; raises ConfigError for what is no model of such images."""
    assert settings.source is not None
    file, function = settings.name.rsplit(":", 1)
    # Whatever it draws from, it draws the same on every rank.
    random.seed(torch.initial_seed())
    np.random.seed(torch.initial_seed() % 2**32)
    with own_code.Blamed("model.name", settings.name):
        model = getattr(own_code.load(file, settings.source), function)(channels, side, num_classes, **settings.options)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model.name: {settings.name} returned {type(model).__name__}; it must return an nn.Module")
        # A copy: what it remembers of these images is nothing to train with.
        with torch.no_grad():
            logits = copy.deepcopy(model).eval()(torch.zeros(2, channels, side, side))
    if getattr(logits, "shape", None) != (2, num_classes):
        shape = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ConfigError(f"model.name: {settings.name} makes {shape} of 2 images; it must make logits [2, {num_classes}]")
    return model.train()
