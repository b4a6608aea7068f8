"""A model that begins with the weights of a file, and modules that keep theirs."""

import hashlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline import models
from pipeline.config import Config, ConfigError, DataError
from pipeline.job import first_weights
from pipeline.models.pretrained import _head, begin, freeze, load_weights
from pipeline.models.torchvision_names import NAMES

HEAD = {"fc.weight", "fc.bias"}


def resnet(seed: int, classes: int = 10, channels: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return models.build("torchvision:resnet18", channels, 32, classes)


@pytest.fixture(scope="module")
def trained() -> dict[str, Tensor]:
    """Of 1,000 classes, in which nothing is as it is drawn."""
    model = resnet(1, 1000)
    for buffer in model.buffers():
        buffer.add_(1)
    return model.state_dict()


def load(model: nn.Module, file: Path) -> dict[str, Tensor]:
    load_weights(model, file, hashlib.sha256(file.read_bytes()).hexdigest())
    return model.state_dict()


def saved(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "weights.pth")
    return folder / "weights.pth"


def test_all_but_a_head_of_another_size_is_that_of_the_file(
    tmp_path: Path, trained: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    drawn = resnet(2).state_dict()
    found = load(resnet(2), saved(tmp_path, trained))
    assert {name for name in found if not torch.equal(found[name], trained[name])} == HEAD
    assert all(torch.equal(found[name], drawn[name]) for name in HEAD)
    assert "model.weights: fc begins at random, as fc.bias is [1000] in the file and [10] here" in caplog.text


def test_a_head_of_the_same_size_is_taken_too(tmp_path: Path, trained: dict[str, Tensor], caplog: pytest.LogCaptureFixture) -> None:
    found = load(resnet(2, 1000), saved(tmp_path, trained))
    assert all(torch.equal(found[name], trained[name]) for name in found)
    assert not caplog.records


@pytest.mark.parametrize("how", ["safetensors", "of DDP", "of pytorch/examples", "of torchvision's references", "half", "old", "legacy"])
def test_what_others_save_is_read(tmp_path: Path, trained: dict[str, Tensor], how: str) -> None:
    wanted, file = trained, tmp_path / "weights.pth"
    if how == "safetensors":
        file = tmp_path / "weights.safetensors"
        save_file(trained, file)
    elif how == "half":
        saved(tmp_path, {name: one.half() if one.is_floating_point() else one for name, one in trained.items()})
        wanted = {name: one.half().float() if one.is_floating_point() else one for name, one in trained.items()}
    elif how == "old":
        saved(tmp_path, {name: one for name, one in trained.items() if not name.endswith("num_batches_tracked")})
        wanted = trained | {name: one for name, one in resnet(2).state_dict().items() if name.endswith("num_batches_tracked")}
    elif how == "legacy":
        torch.save(trained, file, _use_new_zipfile_serialization=False)
    else:
        prefixed = {f"module.{name}": one for name, one in trained.items()}
        epoch = {"epoch": 90, "optimizer": {"state": {}}, "args": Namespace(lr=0.1, device="cuda")}
        saved(tmp_path, {"of DDP": prefixed, "of pytorch/examples": epoch | {"state_dict": prefixed}}.get(how, epoch | {"model": trained}))
    found = load(resnet(2), file)
    assert {name for name in found if not torch.equal(found[name], wanted[name])} == HEAD


def test_a_model_of_grey_images_takes_the_weights_of_colours(tmp_path: Path, trained: dict[str, Tensor]) -> None:
    found = load(resnet(2, channels=1), saved(tmp_path, trained))
    assert {name for name in found if not torch.equal(found[name], trained[name.removeprefix("model.")])} == {
        f"model.{one}" for one in HEAD
    }


def test_the_last_layer_of_every_classifier_of_torchvision_is_its_head() -> None:
    for name in NAMES:
        if name.startswith("regnet") and "400mf" not in name:
            # The larger ones are built alike.
            continue
        extra = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
        # RegNet's widths are computed by tensors.
        with torch.device("cpu" if name.startswith("regnet") else "meta"):
            model = torchvision.models.get_model(name, weights=None, num_classes=37, **extra)
        of_classes = {key for key, one in model.state_dict().items() if one.shape[:1] == (37,)}
        assert of_classes, name
        assert {key for key in model.state_dict() if key.startswith(_head(model))} == of_classes, name


def test_auxiliary_classifiers_are_left_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = torchvision.models.googlenet(weights=None, aux_logits=True, init_weights=False).state_dict()
    assert any(name.startswith("aux") for name in whole)
    found = load(models.build("torchvision:googlenet", 3, 64, 7), saved(tmp_path, whole))
    assert torch.equal(found["conv1.conv.weight"], whole["conv1.conv.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.pop("layer1.0.conv1.weight"), "layer1.0.conv1.weight: not in the file"),
        (
            lambda one: one.update({"layer5.weight": torch.zeros(1), "layer6.weight": torch.zeros(1)}),
            "layer5.weight, and 1 more: not in the model",
        ),
        (lambda one: one.update({"conv1.weight": torch.zeros(64, 1, 7, 7)}), "conv1.weight: of another shape there"),
        (lambda one: one.pop("fc.bias"), "fc.bias: not in the file"),
    ],
    ids=["lacks", "has more", "another shape", "half a head"],
)
def test_the_weights_of_another_model_are_refused(tmp_path: Path, change, said: str) -> None:
    weights = resnet(1).state_dict()
    change(weights)
    with pytest.raises(DataError, match=f"weights.pth is of another model: {said}; set model.name"):
        load(resnet(2), saved(tmp_path, weights))


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path("/tmp/harmed"),)  # pyright: ignore


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_non_finite_are_refused(tmp_path: Path, trained: dict[str, Tensor], value: float) -> None:
    given = trained | {"layer2.0.bn1.running_mean": torch.full((128,), value)}
    with pytest.raises(DataError, match=r"weights.pth: layer2.0.bn1.running_mean is non-finite; take the weights of a training"):
        load(resnet(2), saved(tmp_path, given))


@pytest.mark.parametrize(
    "content",
    [b"", b"no weights", b"PK\x03\x04 cut off", {"epoch": 3}, {}, {0: torch.zeros(1)}, [torch.zeros(1)], nn.Linear(2, 2), Harmful()],
    ids=["empty", "text", "cut off", "a figure", "nothing", "numbers as names", "a list", "a module", "code"],
)
@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_what_holds_no_weights_is_refused_and_runs_no_code(tmp_path: Path, content: Any, ending: str) -> None:
    file = tmp_path / f"weights.{ending}"
    torch.save(content, file) if not isinstance(content, bytes) else file.write_bytes(content)
    with pytest.raises(DataError, match=rf"model.weights: .*weights.{ending} (is damaged, or holds more than tensors|holds no state_dict)"):
        load(resnet(2), file)
    assert not Path("/tmp/harmed").exists()


def test_a_file_that_changes_after_its_digest_was_taken_is_refused(tmp_path: Path, trained: dict[str, Tensor]) -> None:
    with pytest.raises(DataError, match="was changed while the training began; start again"):
        load_weights(resnet(2), saved(tmp_path, trained), "0" * 64)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    settings = Config.model_validate({"model": {"weights": "none.pth"}})
    with pytest.raises(
        DataError, match=r"model.weights: .*none.pth: No such file or directory; name a file, from the folder of params.yaml on"
    ):
        first_weights(settings, tmp_path)
    assert first_weights(Config(), tmp_path) is None


def test_frozen_modules_keep_weights_and_statistics_and_the_others_learn() -> None:
    model = resnet(1).train()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    freeze(model, ["conv1", "bn1", "layer1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    same = {name for name, one in model.state_dict().items() if torch.equal(one, before[name])}
    assert same == {name for name in before if name.startswith(("conv1.", "bn1.", "layer1."))}


def test_a_grey_models_modules_are_named_as_those_of_colours() -> None:
    model = resnet(1, channels=1)
    freeze(model, ["layer4"])
    assert {name for name, one in model.named_parameters() if not one.requires_grad} == {
        name for name, _ in model.named_parameters() if name.startswith("model.layer4.")
    }


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["layer9"], "model.frozen: 'layer9' is unknown; did you mean layer4"),
        ([""], "model.frozen: '' is unknown; known: conv1, bn1"),
        (["conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"], "nothing would be left to train; leave out the last layer"),
    ],
)
def test_what_cannot_be_frozen_is_refused(names: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        freeze(resnet(1), names)


def test_frozen_needs_weights_and_a_strategy_that_knows_it() -> None:
    with pytest.raises(ValueError, match="frozen: only weights that were trained are worth keeping"):
        Config.model_validate({"model": {"frozen": ["conv1"]}})
    models.check_frozen(["conv1"], "ddp")
    models.check_frozen([], "fsdp")
    with pytest.raises(ConfigError, match=r"model.frozen: fsdp trains all of a model; set dist.strategy: ddp, or frozen: \[\]"):
        models.check_frozen(["conv1"], "fsdp")


def test_a_head_that_was_drawn_is_not_frozen(tmp_path: Path, trained: dict[str, Tensor]) -> None:
    file = saved(tmp_path, trained)
    with pytest.raises(ConfigError, match=r"model.frozen: fc.bias begins at random, as the file's has another size; leave its module out"):
        begin(resnet(2), file, hashlib.sha256(file.read_bytes()).hexdigest(), ["fc"])
    begin(resnet(2, 1000), file, hashlib.sha256(file.read_bytes()).hexdigest(), ["fc"])


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone.pth: No such file or directory; it must stay there while a training goes on"):
        load_weights(resnet(2), tmp_path / "gone.pth", "0" * 64)


def test_a_last_layer_of_other_inputs_is_that_of_another_model(tmp_path: Path, trained: dict[str, Tensor]) -> None:
    file = saved(tmp_path, trained | {"fc.weight": torch.zeros(1000, 256)})
    with pytest.raises(DataError, match=r"fc.bias, and 1 more: of another shape there"):
        load(resnet(2), file)
