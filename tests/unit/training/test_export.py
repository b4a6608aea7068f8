"""The published model and the images that it takes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.data import store
from pipeline.data.batches import Pixels
from pipeline.data.order import HOST
from pipeline.training.export import Classifier, exported
from tests.kit.experiment import make_job


def test_the_published_model_sees_the_pixels_that_were_trained_on(tmp_path: Path) -> None:
    manifest = store.read_manifest(make_job(tmp_path).prepared)
    images = torch.arange(256, dtype=torch.uint8).view(16, 1, 4, 4)
    trained = Pixels(manifest.mean, manifest.std, HOST)(images)
    assert torch.equal(Classifier(torch.nn.Identity(), manifest)(images), trained)


class Branches(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) * (2 if images.mean().item() > 0 else 1)


def test_a_model_that_torch_export_cannot_take_is_published_without_a_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = store.read_manifest(make_job(tmp_path).prepared)
    example = torch.zeros((2, 1, 4, 4), dtype=torch.uint8)
    assert exported(Classifier(nn.Flatten(), manifest), example)
    assert not [one for one in caplog.records if one.name == "pipeline.training.export"]
    assert exported(Classifier(Branches(), manifest), example) is None
    (said,) = [one.getMessage() for one in caplog.records if one.name == "pipeline.training.export"]
    assert said.startswith("torch.export cannot take this model, so MLflow gets none that loads by itself: Could not guard on data")
