"""Every model in the catalogue."""

from contextlib import nullcontext

import pytest
import torch
import torchvision

from pipeline import models
from pipeline.config import ConfigError
from pipeline.models.pools import check_backward
from pipeline.models.torchvision_names import NAMES


@pytest.mark.parametrize("name", [*models.CATALOGUE, "torchvision:squeezenet1_1"])
@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32)])
def test_a_model_maps_images_to_logits_and_every_weight_learns(name: str, channels: int, side: int) -> None:
    models.check(name)
    torch.manual_seed(0)
    model = models.build(name, channels, side, 7).to(memory_format=torch.channels_last)
    logits = model(torch.randn(4, channels, side, side))
    assert logits.shape == (4, 7)
    logits.square().mean().backward()
    for weight, parameter in model.named_parameters():
        assert parameter.grad is not None, weight
        assert parameter.grad.abs().max() > 0, weight


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


def test_resnet_is_torchvisions_but_for_its_stem() -> None:
    torch.manual_seed(0)
    ours = models.build("resnet18", 3, 32, 7)
    theirs = torchvision.models.resnet18(num_classes=7)
    theirs.conv1, theirs.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False), torch.nn.Identity()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(4, 3, 32, 32)
    for training in (True, False):
        assert torch.equal(ours.train(training)(images), theirs.train(training)(images))


def test_names_of_torchvision_are_those_that_it_registers() -> None:
    assert sorted(torchvision.models.list_models(module=torchvision.models)) == NAMES
    models.check("torchvision:resnet50")
    with pytest.raises(ConfigError, match=r"model\.name.*did you mean torchvision:resnet50"):
        models.check("torchvision:resnet51")
    with pytest.raises(ConfigError, match=r"model\.name: torchvision: which one"):
        models.check("torchvision:")
    with pytest.raises(ConfigError, match=r"model\.name"):
        models.check("torchvision:fcn_resnet50")


@pytest.mark.parametrize(
    ("name", "side", "pool"),
    [
        ("alexnet", 224, "Identity()"),
        ("alexnet", 160, "AdaptiveAvgPool2d(output_size=(6, 6))"),
        ("vgg11", 448, "AvgPool2d(kernel_size=(2, 2), stride=(2, 2), padding=0)"),
    ],
)
def test_a_pool_without_a_deterministic_backward_is_replaced_where_it_divides_and_refused_for_gpus_elsewhere(name, side, pool) -> None:
    model = models.build(f"torchvision:{name}", 3, side, 7)
    assert repr(model.avgpool) == pool
    check_backward(model, name, torch.device("cpu"))
    refused = pytest.raises(ConfigError, match=rf"^model\.name: {name}: AdaptiveAvgPool2d to \(6, 6\) has no .* set data\.image_size \(224")
    with refused if "Adaptive" in pool else nullcontext():
        check_backward(model, name, torch.device("cuda"))


def test_a_pool_that_divides_computes_what_the_adaptive_one_does() -> None:
    maps = torch.randn(2, 3, 14, 14)
    torch.testing.assert_close(models.build("torchvision:vgg11", 3, 448, 7).avgpool(maps), torch.nn.AdaptiveAvgPool2d((7, 7))(maps))
