"""What ranks compute, however many they are: the model, its data and the loss."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from pipeline import models
from pipeline.config import draw_seed
from pipeline.data import Split, augment, mixing, store
from pipeline.data.batches import Batches, Pixels, balanced, resident
from pipeline.data.order import Order
from pipeline.hardware.binding import bind_to_cpus
from pipeline.job import Job
from pipeline.models import cpu_layers, pretrained
from pipeline.models.pools import check_backward
from pipeline.parallel.lanes import Lanes, Task
from pipeline.ranks import Ranks
from pipeline.training import schedule
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.evaluation import Evaluation
from pipeline.training.guard import NonFiniteGuard, write_diagnosis
from pipeline.training.memory import free_bytes
from pipeline.training.state import State


@dataclass(frozen=True)
class Work:
    """A training, but for who computes which lanes."""

    job: Job
    manifest: store.Manifest
    model: nn.Module
    pixels: Pixels
    order: Order
    reader: Batches
    validation: Split
    # Whether the splits are held in the device's memory.
    hold: bool
    task: Task
    # Whether this rank is bound to CPUs of its own.
    bound: bool

    def evaluation(self, group: Ranks, in_step: bool = False) -> Evaluation:
        """Return the validation split, shared out among ranks."""
        return Evaluation(self.validation, self.pixels, self.manifest.num_classes, group, self.hold, in_step)

    def checkpoints(self, group: Ranks, executor: Executor | None) -> Checkpoints:
        """Return the run's checkpoints."""
        return Checkpoints(self.job.checkpoints, self.job.config.checkpoint.keep, group, self.job.journal, executor)

    def guard(self, state: State, group: Ranks, lanes: Callable[[], Lanes]) -> NonFiniteGuard:
        """Return what stops a training that diverges, and says where."""
        path, samples = self.job.run / "diverged.json", self.order.lane
        return NonFiniteGuard(state, group, lambda step: write_diagnosis(path, self.task, lanes(), group, samples, step))


def begin(job: Job, device: torch.device, agreed: Callable[[bool], bool]) -> Work:
    """Make the model, open its data, and bind this rank to its CPUs, if that is agreed on."""
    config = job.config
    manifest = store.read_manifest(job.prepared)
    pixels = Pixels(manifest.mean, manifest.std, device)
    model = build_model(job, manifest, device).train()
    if job.first_weights is not None:
        pretrained.begin(model, job.first_weights.file, job.first_weights.sha256, config.model.frozen)
    check_backward(model, config.model.name, device)
    split, validation, hold = open_splits(job, device)
    bound = bind_to_cpus(device.type, config.dist.threads_per_rank, agreed)
    order = Order(config.seed, len(split.labels), config.dist.images_per_step, config.dist.pieces)
    reader, dtype = batches(job, split, pixels, order, hold, manifest), schedule.autocast_dtype(job.precision)
    weights = balanced(split.labels, device) if config.train.class_weights == "balanced" else None
    autocast = partial(torch.autocast, device.type, dtype, enabled=dtype is not None)
    task = Task(model, reader.lane, config.seed, config.train.label_smoothing, autocast, weights, config.model.source is not None)
    return Work(job, manifest, model, pixels, order, reader, validation, hold, task, bound)


def build_model(job: Job, manifest: store.Manifest, device: torch.device) -> nn.Module:
    """Return the experiment's model with its initial weights."""
    channels, side, _ = manifest.shape
    torch.manual_seed(draw_seed(job.config.seed, "weights"))
    model = models.of(job.config.model, channels, side, manifest.num_classes)
    if device.type == "cpu":
        # On one rank `native` trains LeNet as the loop that everyone writes does, to its bits, in small micro-batches, too.
        cpu_layers.replace_kernels(model, weights_by_products=job.config.dist.reduction == "ordered")
    return model.to(device=device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]


def open_splits(job: Job, device: torch.device) -> tuple[Split, Split, bool]:
    """Return the training and the validation split, and True if both are to be held in the device's memory."""
    splits = [store.open_split(job.prepared, name) for name in ("train", "validation")]
    return splits[0], splits[1], resident(splits, free_bytes(device))


def batches(job: Job, split: Split, pixels: Pixels, order: Order, hold: bool, manifest: store.Manifest) -> Batches:
    """Return the training batches."""
    given = job.config.data.augment, job.config.seed, len(split.labels)
    return Batches(split, order, augment.build(*given, manifest.mean), pixels, hold, mixing.build(*given, manifest.num_classes))
