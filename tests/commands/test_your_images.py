"""The page for one's own images, from a folder to a class name that the model in MLflow predicts for a file: each command as it stands."""

import re
from pathlib import Path

import mlflow
import numpy as np
import pytest
import yaml
from PIL import Image

from pipeline.data import store
from tests.commands.test_pipeline import clone, run, runs
from tests.kit.documents import OWN_IMAGES, blocks
from tests.kit.experiment import Experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["clone"]


def photograph(number: int, kind: str) -> Image.Image:
    """A coloured ground, on it bright stripes: those of cats stand, those of dogs lie."""
    random = np.random.default_rng(number)
    height, width = (int(one) for one in random.integers(50, 120, 2))
    rows, columns = np.mgrid[0:height, 0:width]
    stripes = ((columns if kind == "cat" else rows) // 8 + number) % 2
    ground = random.integers(0, 90, 3)
    return Image.fromarray((ground + stripes[..., None] * 120 + random.integers(0, 20, (height, width, 3))).astype(np.uint8))


def for_a_colleague(clone: Path) -> None:
    """Who clones and pulls has the images and the model."""
    run(clone, "git clone -q . ../colleague && cd ../colleague && dvc pull")
    for name in ("photos/cat/7.jpg", "models/model.safetensors"):
        assert (clone.parent / "colleague" / name).read_bytes() == (clone / name).read_bytes()


def another_augmentation_prepares_nothing(clone: Path) -> None:
    """Another augmentation has the same prepared data."""
    text = (clone / "params.yaml").read_text()
    values = yaml.safe_load(text)
    values["data"]["augment"] = "crop-flip"
    (clone / "params.yaml").write_text(yaml.safe_dump(values))
    assert "prepare:" not in (changed := run(clone, "dvc status"))
    assert "train:" in changed
    (clone / "params.yaml").write_text(text)


def test_a_folder_of_images_becomes_a_model_in_mlflow_that_names_their_classes(clone: Path) -> None:
    for kind, ending in (("cat", "jpg"), ("dog", "png")):
        (clone / "photos" / kind).mkdir(parents=True)
        for number in range(1, 121):
            photograph(number, kind).save(clone / "photos" / kind / f"{number}.{ending}")
    stages = yaml.safe_load((clone / "dvc.yaml").read_text())
    stages["stages"]["prepare"]["deps"].append("photos")
    (clone / "dvc.yaml").write_text(yaml.safe_dump(stages, sort_keys=False))
    values = yaml.safe_load((clone / "params.yaml").read_text())
    values["train"]["epochs"] = 8
    (clone / "params.yaml").write_text(yaml.safe_dump(values))
    (listing,) = re.findall(r"^```python\n(.*?)^```", OWN_IMAGES.read_text(), re.MULTILINE | re.DOTALL)
    (clone / "predict.py").write_text(listing)
    said = {command: run(clone, command) for command in blocks(OWN_IMAGES)}
    assert "; its model: models:/lockstep-imagefolder-photos/1\n" in "".join(said.values())
    manifest = store.read_manifest(clone / "data" / "prepared")
    assert (manifest.class_names, manifest.shape, sum(manifest.counts.values())) == (["cat", "dog"], (3, 64, 64), 240)
    (found,) = [one for one in runs(clone) if one.data.params["data.name"] == "imagefolder"]
    assert found.data.metrics["test/accuracy"] > 0.9
    assert re.search(r"0 +dog +(0\.[5-9]\d*|1\.0*)$", said["python predict.py photos/dog/2.png"].strip())
    # Of all files, as large as they are, it predicts what evaluate predicted for those that were prepared from them.
    rows = run(clone, "python predict.py photos/cat/* photos/dog/*").splitlines()[1:]
    right = [row.split()[1] == kind for row, kind in zip(rows, ["cat"] * 120 + ["dog"] * 120, strict=True)]
    assert sum(right) > 220
    # The remote has the images.
    assert len([*(clone.parent / "lockstep-photos").rglob("*")]) > 240
    for_a_colleague(clone)
    another_augmentation_prepares_nothing(clone)
    # A changed image is a changed data set, and what was trained on the former one is not taken for it.
    before, digest = found.info.run_id, manifest.digest
    photograph(500, "cat").save(clone / "photos" / "cat" / "7.jpg")
    run(clone, "dvc repro prepare")
    assert store.read_manifest(clone / "data" / "prepared").digest != digest
    assert "'train' didn't change" not in (changed := run(clone, "dvc status"))
    assert "train" in changed
    # Back again, from what DVC keeps: nothing is to be done.
    run(clone, "git checkout -q photos.dvc && dvc checkout --force photos.dvc && dvc repro")
    assert store.read_manifest(clone / "data" / "prepared").digest == digest
    assert {one.info.run_id for one in runs(clone) if one.data.params["data.name"] == "imagefolder"} == {before}
    assert mlflow.MlflowClient(f"sqlite:///{clone / 'mlflow.db'}").get_registered_model("lockstep-imagefolder-photos").latest_versions


def test_files_that_are_kept_are_trained_and_evaluated_to_the_bits_of_pixels(tmp_path: Path) -> None:
    for kind in ("cat", "dog"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number in range(80):
            photograph(number, kind).save(tmp_path / "photos" / kind / f"{number}.jpg")
    (tmp_path / "photos" / "cat" / "broken.jpg").write_bytes(b"no image")
    found: list[tuple[str, float, float]] = []
    for kept in ("pixels", "originals"):
        (tmp_path / kept).mkdir()
        one = Experiment(tmp_path / kept).with_database()
        data = {
            "name": "imagefolder",
            "root": "../photos",
            "image_size": 32,
            "store": kept,
            "allow_broken": 1,
            "augment": ["flip", "mixup"],
        }
        one.set(data=data, dist__batch_size_per_gpu=16)
        assert "photos/cat/broken.jpg: cannot be decoded" in one.run("prepare")
        one.run("train")
        one.run("evaluate")
        result = one.json("metrics/eval.json")
        found.append((one.json("models/receipt.json")["weights_sha256"], result["accuracy"], result["loss"]))
        assert "bit-equal" in one.run("verify", "--steps", "4")
    assert found[0] == found[1]
