"""A perceptron with two hidden layers and dropout."""

from torch import nn


def build(channels: int, side: int, num_classes: int) -> nn.Module:
    """Build a perceptron on all pixels."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * side * side, 256),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(256, num_classes),
    )
