"""The LeNet of the tutorials: conv 20 @ 3x3, conv 50 @ 5x5, 800-128-classes on 28x28 images."""

from torch import nn

from pipeline.config import ConfigError

SMALLEST_SIDE = 16


def build(channels: int, side: int, num_classes: int) -> nn.Module:
    """Build LeNet for square images of 16 pixels a side or more."""
    if side < SMALLEST_SIDE:
        raise ConfigError(f"model.name: lenet needs images of {SMALLEST_SIDE} pixels or more, these have {side}; set data.image_size")
    left = ((side - 2) // 2 - 4) // 2
    # In place after a convolution, as in torchvision's models: its maps are the largest tensors of a step.
    return nn.Sequential(
        nn.Conv2d(channels, 20, 3),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * left * left, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )
