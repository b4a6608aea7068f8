"""The published model: the best weights as safetensors, and a torch.export program that needs none of this code."""

import io
import logging

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline import models
from pipeline.config import MachineError
from pipeline.data import store
from pipeline.files import atomic_write
from pipeline.job import Job
from pipeline.runs.checkpoints import intact
from pipeline.training.checkpoint import read_or_rebuild_index

log = logging.getLogger(__name__)

EXAMPLE_IMAGES = 2


class Classifier(nn.Module):
    """A trained model that takes images as they are: uint8 [N, C, H, W] from 0 to 255."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, manifest: store.Manifest):
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(manifest.mean)[None, :, None, None])
        self.register_buffer("std", torch.tensor(manifest.std)[None, :, None, None])

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model((images.float() / 255 - self.mean) / self.std)
        return logits


def export(job: Job) -> None:
    """Write the model with its best weights into the run's folder: `model.safetensors` and `model.pt2`."""
    best = read_or_rebuild_index(job.checkpoints).get("best")
    file = intact(job.checkpoints, best, log.warning) if best else None
    if file is None:
        name = best["file"] if best else "best-*.safetensors"
        raise MachineError(f"{job.checkpoints / name}: is damaged and there is no other; move {job.run} away to train again")
    manifest = store.read_manifest(job.prepared)
    channels, side, _ = manifest.shape
    # In plain memory order: a tensor in another one is stored as a slice of itself.
    model = models.of(job.config.model, channels, side, manifest.num_classes)
    model.load_state_dict(load_file(file))
    classifier = Classifier(model, manifest).eval()
    packed = exported(classifier, torch.zeros((EXAMPLE_IMAGES, *manifest.shape), dtype=torch.uint8))
    if packed is not None:
        atomic_write(job.run / "model.pt2", packed)
    atomic_write(job.run / "model.safetensors", file.read_bytes())


def exported(classifier: Classifier, example: Tensor) -> bytes | None:
    """Return the model as a torch.export program, or None, with a warning, if its forward is no such: it branches on values, say."""
    try:
        # "AUTO": the number of images is free where the model allows it.
        program = torch.export.export(classifier, (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        log.warning("torch.export cannot take this model, so MLflow gets none that loads by itself: %s", said)
        return None
    for node in program.graph.nodes:
        # The paths of this machine's source.
        node.meta.pop("stack_trace", None)
    # Into memory: on a full disk torch's own writer ends the process.
    packed = io.BytesIO()
    torch.export.save(program, packed)
    return packed.getvalue()
