"""The published model and the images that it takes."""

from pathlib import Path

import torch

from pipeline.data import store
from pipeline.data.batches import Pixels
from pipeline.data.order import HOST
from pipeline.training.export import Classifier
from tests.kit.experiment import make_job


def test_the_published_model_sees_the_pixels_that_were_trained_on(tmp_path: Path) -> None:
    manifest = store.read_manifest(make_job(tmp_path).prepared)
    images = torch.arange(256, dtype=torch.uint8).view(16, 1, 4, 4)
    trained = Pixels(manifest.mean, manifest.std, HOST)(images)
    assert torch.equal(Classifier(torch.nn.Identity(), manifest)(images), trained)
