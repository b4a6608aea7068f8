"""A model that a file beside params.yaml builds."""

import copy
import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from pipeline.config import ConfigError, own_code

if TYPE_CHECKING:
    from pipeline.config.sections import Model


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
        lost = changed_and_not_saved(model, torch.zeros(2, channels, side, side))
    if getattr(logits, "shape", None) != (2, num_classes):
        shape = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ConfigError(f"model.name: {settings.name} makes {shape} of 2 images; it must make logits [2, {num_classes}]")
    if lost:
        raise ConfigError(f"model.name: {settings.name}: training changes the buffer {lost}, which checkpoints lack; make it persistent")
    return model.train()


def changed_and_not_saved(model: nn.Module, images: torch.Tensor) -> str | None:
    """The name of a buffer that each forward in training changes and the state_dict lacks: a resume would lose its values."""
    names = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
    if not names:
        return None
    tried, values = copy.deepcopy(model).train(), list[dict[str, torch.Tensor]]()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        # What the first forward computes and later ones use is the same after a resume.
        for shift in (0.0, 1.0):
            tried(images + shift)
            values.append({name: one.clone() for name, one in tried.named_buffers() if name in names})
    before, after = values
    return next((name for name, one in after.items() if name not in before or not torch.equal(one, before[name])), None)
