"""What a folder of images is called: nothing where it is read from changes, and models of another one are other models."""

from pathlib import Path

import pytest

from pipeline import data, prepare
from pipeline.config import Config
from pipeline.data import store
from pipeline.files import Paths
from tests.kit.experiment import settings
from tests.unit.data.test_imagefolder import fill


def test_a_folder_that_moves_is_the_same_data_set(tmp_path: Path) -> None:
    root, found = tmp_path / "images", list[str]()
    fill(root / "train", 6)
    fill(root / "test", 2, 50)
    for name in ("images", "moved"):
        if name == "moved":
            root.rename(tmp_path / name)
        values = {"data": {"name": "imagefolder", "root": str(tmp_path / name), "image_size": 16}}
        prepare.run(Config.model_validate(settings(**values)), Paths(tmp_path / "params.yaml"))
        found.append(store.read_manifest(tmp_path / "data" / "prepared").digest)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("of", "known"),
    [
        ({"name": "fashion-mnist:6000", "root": "/somewhere"}, "fashion-mnist"),
        ({"name": "imagefolder", "root": "data/cars/"}, "imagefolder-cars"),
        ({"name": "imagefolder", "root": "/data/cats"}, "imagefolder-cats"),
    ],
)
def test_models_of_another_folder_are_versions_of_another_model(of: dict[str, str], known: str) -> None:
    assert data.title(of) == known
