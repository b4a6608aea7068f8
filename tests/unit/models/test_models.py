"""Every model in the catalogue."""

import pytest
import torch

from pipeline import models
from pipeline.config import ConfigError


@pytest.mark.parametrize("name", [*models.CATALOGUE, "torchvision:squeezenet1_1"])
@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32)])
def test_a_model_maps_images_to_logits_and_every_weight_learns(name: str, channels: int, side: int) -> None:
    models.check(name)
    torch.manual_seed(0)
    model = models.build(name, channels, side, 7).to(memory_format=torch.channels_last)
    logits = model(torch.randn(4, channels, side, side))
    assert logits.shape == (4, 7)
    logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_same_seed_gives_the_same_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(models.build("resnet18", 1, 28, 10).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_lenet_is_the_one_of_the_tutorials() -> None:
    shapes = [tuple(parameter.shape) for parameter in models.build("lenet", 1, 28, 10).parameters() if parameter.dim() > 1]
    assert shapes == [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]


def test_resnet_has_a_small_stem_and_no_max_pool() -> None:
    model = models.build("resnet18", 1, 28, 10)
    assert model.conv1.weight.shape == (64, 1, 3, 3)
    assert model.layer1(model.maxpool(model.relu(model.bn1(model.conv1(torch.zeros(1, 1, 28, 28)))))).shape == (1, 64, 28, 28)


def test_images_too_small_for_a_model_are_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"lenet needs images of 16 pixels or more, these have 8; set data\.image_size"):
        models.build("lenet", 1, 8, 10)


def test_a_torchvision_model_that_needs_larger_images_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"model\.name: vgg11 cannot take images of 28 pixels .*; set data\.image_size"):
        models.build("torchvision:vgg11", 1, 28, 10)


def test_names_of_torchvision_are_those_that_it_registers() -> None:
    """They are read from its source without importing it."""
    import torchvision

    registered = torchvision.models.list_models(module=torchvision.models)
    for name in registered:
        models.check(f"torchvision:{name}")
    with pytest.raises(ConfigError, match=r"model\.name"):
        models.check("torchvision:fcn_resnet50")
