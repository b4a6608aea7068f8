"""ResNet-18 for small images: a 3x3 stem and no max-pool, with any number of channels."""

from torch import nn
from torchvision.models import resnet18


def build(channels: int, side: int, num_classes: int) -> nn.Module:
    """Build torchvision's ResNet-18 with a stem for small images."""
    model = resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    return model
