"""A data set that a function in a file of the user's own returns."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from torchvision.datasets import Flowers102

from pipeline import data, prepare
from pipeline.config import Config, ConfigError, DataError
from pipeline.data import store
from pipeline.files import Paths
from tests.kit.experiment import ROOT, settings
from tests.unit.data.test_imagefolder import picture

DATA = """
import numpy as np
from pipeline.data import Raw, Split


def load(request):
    def split(count: int) -> Split:
        labels = np.arange(count) % 3
        images = np.full((count, 1, 16, 16), 50) * labels[:, None, None, None]
        return Split(images.astype(np.uint8), labels.astype(np.int64))
    return Raw(split(120), split(30), ["dark", "grey", "light"])
"""
RAW = """    import numpy as np
    from pipeline.data import Raw, Split
    images, labels = np.zeros((9, 1, 8, 8), np.uint8), np.zeros(9, np.int32)
    return Raw(Split"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data_of_mine.py").write_text(DATA)
    return tmp_path


def test_a_data_set_is_prepared_from_a_function(root: Path) -> None:
    config = Config.model_validate(settings(data={"name": "data_of_mine.py:load"}))
    prepare.run(config, Paths(root / "params.yaml"))
    manifest = store.read_manifest(root / "data" / "prepared")
    assert manifest.class_names == ["dark", "grey", "light"]
    assert (manifest.counts["train"] + manifest.counts["validation"], manifest.counts["test"]) == (120, 30)
    split = store.open_split(root / "data" / "prepared", "test")
    assert np.array_equal(split.images[:, 0, 0, 0] // 50, split.labels)
    assert data.title({"name": "data_of_mine.py:load", "root": None}) == "data_of_mine"


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        ("    return 3", DataError, "data.name: data_of_mine.py:load returned int; it must return a pipeline.data.Raw"),
        (f"{RAW}(images, [0.5] * 9), Split(images, labels), [1])", DataError, r"load, train: images and labels are uint8 .* and float64"),
        (f"{RAW}(images, labels), Split(images / 2, labels), [1])", DataError, r"load, test: images and labels are float64"),
        (
            f"{RAW}(images, labels), Split(images, labels[1:]), [1])",
            DataError,
            r"load, test: .* and int32 \[8\]; they must",
        ),
        (f"{RAW}(images, labels), None, [1])", DataError, "data.name: data_of_mine.py:load, test: is None; only validation may be None"),
        (f"{RAW.removesuffix('Split')}None, Split(images, labels), [1])", DataError, "load, train: is None; only validation may be None"),
        (
            f"{RAW.removesuffix('Split')}3, Split(images, labels), [1])",
            DataError,
            r"load, train: are no arrays of images and labels \(.*int",
        ),
        (f"{RAW}(images, labels), Split(images, labels), None)", DataError, "load, class_names: is NoneType; it must be a list of names"),
        (f"{RAW}(images, labels), Split(images, labels), 'cat')", DataError, "load, class_names: is str; it must be a list of names"),
        (
            f"{RAW}([images[0], images[0, :, 1:]], labels[:2]), Split(images, labels), [1])",
            DataError,
            r"data.name: data_of_mine.py:load, train: are no arrays of images and labels \(.*inhomogeneous.*\); they must be uint8",
        ),
        (
            f"{RAW}(images, labels), Split(Lazy(), labels), [1])\nclass Lazy:\n    def __array__(self, *_, **__): open('nowhere')",
            ConfigError,
            r"data.name: data_of_mine.py:7: FileNotFoundError: ",
        ),
        ("    open('nowhere')", ConfigError, r"data.name: data_of_mine.py:\d: FileNotFoundError: "),
        ("    from pipeline.config import DataError\n    raise DataError('no images')", DataError, "^no images"),
    ],
)
def test_what_goes_wrong_in_it_is_one_line(root: Path, body: str, kind: type[Exception], said: str) -> None:
    (root / "data_of_mine.py").write_text(f"def load(request):\n{body}\n")
    with pytest.raises(kind, match=said) as error:
        prepare.run(Config.model_validate(settings(data={"name": "data_of_mine.py:load"})), Paths(root / "params.yaml"))
    assert "\n" not in str(error.value)


def test_the_documents_own_data_set_reads_torchvisions_flowers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listings = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE | re.DOTALL)
    (listing,) = [one for one in listings if "Flowers102" in one]
    (tmp_path / "flowers.py").write_text(listing)
    folder = tmp_path / "data" / "raw" / "flowers-102"
    (folder / "jpg").mkdir(parents=True)
    for number in range(1, 307):
        picture(number, 40 + number % 9, 30).save(folder / "jpg" / f"image_{number:05}.jpg")
    # Three of each of its classes: one to train on, one to validate, one to test.
    savemat(folder / "imagelabels.mat", {"labels": np.arange(306) % 102 + 1})
    thirds = np.arange(1, 307).reshape(3, 102)
    savemat(folder / "setid.mat", dict(zip(("trnid", "valid", "tstid"), thirds, strict=True)))
    digests = {path.name: hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() for path in folder.glob("*.mat")}
    known = {key: (name, digests.get(name, digest)) for key, (name, digest) in Flowers102._file_dict.items()}
    monkeypatch.setattr(Flowers102, "_file_dict", known)
    config = Config.model_validate(settings(data={"name": "flowers.py:load", "image_size": 24}))
    assert prepare.run(config, Paths(tmp_path / "params.yaml")) == 0
    manifest = store.read_manifest(tmp_path / "data" / "prepared")
    assert (manifest.counts, manifest.shape) == ({"train": 102, "validation": 102, "test": 102}, (3, 24, 24))
    assert manifest.class_names == Flowers102.classes
