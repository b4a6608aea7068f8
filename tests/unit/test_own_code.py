"""A model of the user's own: found, checked without running it, and named by what its file holds."""

import subprocess
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import data, models
from pipeline.config import Config, ConfigError, own_code
from pipeline.parallel.lanes import Task
from pipeline.runs.identity import versions
from pipeline.runs.source import source_digests
from pipeline.tracking.receipt import git_state
from tests.kit.experiment import settings

MODEL = """
from torch import nn

from pipeline.models.pools import check_backward


def build(channels: int, side: int, num_classes: int, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODEL)
    return tmp_path


def configured(root: Path, **model: object) -> Config:
    config = Config.model_validate(settings(model={"name": "mine.py:build", **model}))
    return config.model_copy(update={"model": models.with_source(config.model, root)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"other.py: No such file or directory; name a file, from the folder of params.yaml on"),
        ("def make(): pass\nclass Net: pass\ndef other(): pass", r"other.py: has no function build; it has make, other"),
        ("class build: pass", r"other.py: build is a class; name a function, which may call it"),
        ("import torch", r"other.py: has no function build; it has none"),
        ("x = 1\ndef build(", r"other.py:2: '\(' was never closed"),
        ("x = '\\0'\n\0", r"other.py:\d+: source code"),
        (b"\xff = 1", r"other.py:1: it holds bytes that no Python has"),
        (
            "import beside\ndef build(): pass",
            r"imports beside, which is of no installed package and would be in no fingerprint; put it into other.py",
        ),
        ("def build():\n    from beside import x", r"imports beside, which is of no installed package"),
        ("from package.inner import x\ndef build(): pass", r"imports package, which is of no installed package"),
        ("from . import x\ndef build(): pass", r"imports \., which is of no installed package"),
        ("import not_installed\ndef build(): pass", r"imports not_installed, which is of no installed package"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_and_nothing_of_it_runs(tmp_path: Path, text: str | bytes | None, said: str) -> None:
    (tmp_path / "beside.py").write_text("raise SystemExit(3)")
    (tmp_path / "package").mkdir()
    if text is not None:
        (tmp_path / "other.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said) as error:
        own_code.read("model.name", "other.py:build", tmp_path)
    assert str(error.value).startswith("model.name: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["other.py", "other:build", "other.py:", "other.py:build()", "other.py:a.b"])
def test_what_is_no_name_of_a_function_in_a_file_is_unknown(name: str) -> None:
    for check in (models.check, data.check):
        with pytest.raises(ConfigError, match="is unknown"):
            check(name)
    models.check("folder/other.py:build")
    data.check("folder/other.py:load")


def test_options_are_those_of_the_function(root: Path) -> None:
    assert configured(root, options={"width": 6}).model.options == {"width": 6}
    with pytest.raises(ConfigError, match=r"model.options.depth: mine.py:build does not take it; it takes width"):
        configured(root, options={"depth": 6})
    (root / "mine.py").write_text("def build(channels, side, num_classes, **more): pass")
    configured(root, options={"depth": 6})
    with pytest.raises(ConfigError, match=r"model.options: lenet takes none; they are for a model of your own, such as mine.py:build"):
        configured(root, name="lenet", options={"width": 6})


def test_a_model_is_built_from_what_was_read_with_its_options(root: Path) -> None:
    narrow, wide = configured(root).model, configured(root, options={"width": 7}).model
    # What the file holds by now does not matter.
    (root / "mine.py").unlink()
    assert [next(models.of(one, 1, 16, 3).parameters()).shape[0] for one in (narrow, wide)] == [4, 7]
    found = models.of(wide, 1, 16, 3)
    assert found.training
    assert found(torch.zeros(2, 1, 16, 16)).shape == (2, 3)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    return nn.Linear(", None),
        ("    raise KeyError('depth')", r"model.name: mine.py:\d+: KeyError: 'depth'"),
        ("    return 3", r"model.name: mine.py:build returned int; it must return an nn.Module"),
        ("    return nn.Flatten()", r"model.name: mine.py:build makes \[2, 256\] of 2 images; it must make logits \[2, 3\]"),
        ("    return nn.Linear(7, 3)", r"model.name: mine.py: RuntimeError: mat1 and mat2"),
    ],
)
def test_what_is_no_model_of_these_images_is_one_line(root: Path, body: str, said: str | None) -> None:
    (root / "mine.py").write_text(f"from torch import nn\ndef build(channels, side, num_classes):\n{body}\n")
    with pytest.raises(ConfigError, match=said or "was never closed"):
        models.of(configured(root).model, 1, 16, 3)


def test_all_that_its_file_draws_is_drawn_from_the_seed(root: Path) -> None:
    draws = "import random\nimport numpy as np\nimport torch\nfrom torch import nn\n"
    draws += "def build(channels, side, num_classes):\n    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 3))\n"
    draws += "    model.drawn = [random.random(), np.random.rand(), torch.rand(1).item()]\n    return model\n"
    (root / "mine.py").write_text(draws)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(models.of(configured(root).model, 1, 16, 3).drawn)
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])


def test_a_lane_draws_the_same_whatever_its_rank_has_drawn_before() -> None:
    import random

    def batch(step: int, lane: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)

    task = Task(torch.nn.Identity(), batch, 3, 0.0, nullcontext, seeds_all=True)
    found: dict[int, list[list[float]]] = {1: [], 2: []}
    for lanes in ([1, 2], [2], [2, 1]):
        for lane in lanes:
            task.begin(5, lane)
            found[lane].append([random.random(), float(np.random.rand()), torch.rand(1).item()])
    for draws in found.values():
        assert all(one == draws[0] for one in draws)
    assert found[1][0] != found[2][0]


REMEMBERS = """
import torch
from torch import nn

class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 3)
        self.register_buffer("kept", torch.zeros(SHAPE), persistent=PERSISTENT)

    def forward(self, images):
        with torch.no_grad():
            self.kept.copy_(VALUE)
        return self.linear(images.flatten(1))

def build(channels, side, num_classes):
    return Remembers()
"""


@pytest.mark.parametrize(
    ("value", "persistent", "refused"),
    [("0.9 * self.kept + images.mean()", False, True), ("self.kept + 1", False, True), ("self.kept + 1", True, False), ("7", False, False)],
)
@pytest.mark.parametrize("shape", ["1", "()"])
def test_a_buffer_that_training_changes_must_be_saved(root: Path, shape: str, value: str, persistent: bool, refused: bool) -> None:
    value = value if value != "7" else "torch.tensor(7.0)"
    (root / "mine.py").write_text(REMEMBERS.replace("VALUE", value).replace("PERSISTENT", str(persistent)).replace("SHAPE", shape))
    said = "mine.py:build: training changes the buffer kept, which checkpoints lack; make it persistent"
    with pytest.raises(ConfigError, match=said) if refused else nullcontext():
        models.of(configured(root).model, 1, 16, 3)


def test_what_a_forward_remembers_of_the_trial_is_not_trained_with(root: Path) -> None:
    (root / "mine.py").write_text("""
import torch
from torch import nn


class Net(nn.Linear):
    kept = None

    def forward(self, images):
        if self.kept is None:
            self.kept = torch.cos(images[:1])
        return super().forward((images * self.kept).flatten(1))


def build(channels, side, num_classes):
    return Net(channels * side * side, num_classes)
""")
    model = models.of(configured(root).model, 1, 16, 3)
    assert model.kept is None
    model(torch.ones(2, 1, 16, 16)).sum().backward()


def test_the_identity_follows_from_what_it_holds_and_not_from_where_it_lies(root: Path) -> None:
    def identity(**model: object) -> object:
        config = configured(root, **model)
        return config.identity("", "", ""), source_digests(config), versions(config, "cpu", "gloo")

    here = identity()
    assert "models.pools" in source_digests(configured(root))
    assert "models.lenet" not in source_digests(configured(root))
    (root / "folder").mkdir()
    (root / "folder" / "other.py").write_text(MODEL)
    assert identity(name="folder/other.py:build") == here
    assert identity(options={"width": 5}) != here
    (root / "mine.py").write_text(MODEL.replace("ReLU", "GELU"))
    assert identity() != here


def test_the_version_of_a_package_that_it_imports_is_in_the_identity(root: Path) -> None:
    assert "scipy" not in versions(configured(root), "cpu", "gloo")
    (root / "mine.py").write_text("import scipy\n" + MODEL)
    assert "scipy" in versions(configured(root), "cpu", "gloo")


def test_a_file_that_is_in_no_commit_or_was_changed_is_nothing_to_promote(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "dvc.yaml").write_text("")
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / ".gitignore").write_text("mine.py")
    git("add", "dvc.yaml")
    git("commit", "-m", "x")
    # Both functions may be in one file.
    own = own_code.files(tmp_path, "mine.py:build", "imagefolder", "mine.py:load")
    assert git_state(tmp_path)["dirty"] is False
    assert git_state(tmp_path, own)["dirty"] is True
    git("add", "--force", "mine.py")
    git("commit", "-m", "y")
    assert git_state(tmp_path, own)["dirty"] is False
    (tmp_path / "mine.py").write_text(MODEL + "\n")
    assert git_state(tmp_path, own)["dirty"] is True
    git("checkout", "mine.py")
    elsewhere = git_state(tmp_path, own_code.files(tmp_path.parent, "elsewhere.py:build"))
    assert (elsewhere["commit"], elsewhere["dirty"]) == (git_state(tmp_path)["commit"], True)
