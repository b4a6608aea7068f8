"""What a finished training leaves: the best model as plain weights, and as a program that needs none of this code."""

import io

import torch
from safetensors.torch import load
from torch import Tensor, nn

from pipeline.config import MachineError
from pipeline.data import store
from pipeline.files import write_whole
from pipeline.job import Job
from pipeline.training.checkpoint import checked, read_index

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


def export(job: Job, model: nn.Module) -> None:
    """Write `model.safetensors` and `model.pt2` into the run's folder; the model is given its best weights."""
    best = read_index(job.checkpoints).get("best")
    content = checked(job.checkpoints, best) if best else None
    if content is None:
        name = best["file"] if best else "best-*.safetensors"
        raise MachineError(f"{job.checkpoints / name}: is damaged and there is no other; move {job.run} away to train again")
    # In plain memory order: a tensor in another one is stored as a slice of itself.
    model.to(device="cpu", memory_format=torch.contiguous_format).load_state_dict(load(content))  # pyright: ignore[reportCallIssue]
    manifest = store.read_manifest(job.prepared)
    classifier = Classifier(model, manifest).eval()
    example = torch.zeros((EXAMPLE_IMAGES, *manifest.shape), dtype=torch.uint8)
    # "AUTO": the number of images is free where the model allows it.
    program = torch.export.export(classifier, (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    # Into memory: on a full disk torch's own writer ends the process.
    packed = io.BytesIO()
    torch.export.save(program, packed)
    write_whole(job.run / "model.pt2", packed.getvalue())
    write_whole(job.run / "model.safetensors", content)
