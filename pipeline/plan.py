"""What is to be run: an experiment, resolved on this machine before anything is written."""

import os
from dataclasses import dataclass
from typing import Any

from pipeline import models
from pipeline.config import Config, ConfigError
from pipeline.data import store
from pipeline.files import Paths
from pipeline.hardware import machine
from pipeline.hardware.placement import Placement, a_gpu_each, as_many_ranks, resolve
from pipeline.job import Job, first_weights
from pipeline.process_tree import NODES, STORE
from pipeline.runs import checkpoints
from pipeline.runs.identity import fingerprint, run_identity
from pipeline.tracking import journal as journals


@dataclass(frozen=True)
class Plan:
    """What is to be trained, before anything is written."""

    job: Job
    manifest: store.Manifest
    placement: Placement
    identity: dict[str, Any]
    steps_per_epoch: int

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.job.config.train.epochs

    @property
    def done(self) -> bool:
        """Return True if it was trained to the end before."""
        ends = (line for line in journals.read(self.job.journal) if line["kind"] == "ended")
        return any(line["stage"] == "train" and line["outcome"] == "done" for line in ends)

    def has_reached(self, step: int) -> bool:
        """Return True if it went on to this end of an epoch before: a stop may have cut off the validation there."""
        figures = journals.metrics_by_step(self.job.journal).get(step, {})
        return "validation/accuracy" in figures and checkpoints.newest_step(self.job.run) >= step


def plan(config: Config, paths: Paths, stop_after_epochs: int | None = None) -> Plan:
    """Resolve an experiment on this machine; raises what stands in its way."""
    config = config.model_copy(update={"model": models.with_source(config.model, paths.root)})
    config, placement = resolved(config)
    manifest = store.read_manifest(paths.prepared)
    store.check_made_for(paths.prepared, manifest, config)
    steps_per_epoch = manifest.counts["train"] // config.dist.images_per_step
    if steps_per_epoch == 0:
        counted = f"{manifest.counts['train']} training images do not fill a global batch of {config.dist.images_per_step}"
        raise ConfigError(f"dist.{config.dist.batch_key}: {counted}; lower it")
    first = first_weights(config, paths.root)
    identity = run_identity(config, placement, manifest.identity, first)
    job = Job(
        config=config,
        device=placement.device,
        backend=placement.backend,
        precision=placement.precision,
        prepared=paths.prepared,
        run=paths.runs / fingerprint(identity),
        until=stop_after_epochs * steps_per_epoch if stop_after_epochs and stop_after_epochs < config.train.epochs else None,
        first_weights=first,
    )
    return Plan(job, manifest, placement, identity, steps_per_epoch)


def resolved(config: Config) -> tuple[Config, Placement]:
    """The configuration on as many machines and ranks as there are, and what its ranks compute on."""
    here = machine.detect()
    config = a_gpu_each(as_many_ranks(resolve_num_nodes(config), here, os.environ.get("PET_NPROC_PER_NODE", "")), here)
    return config, resolve(config, here)


def resolve_num_nodes(config: Config) -> Config:
    """The configuration over as many machines as a leader gives, or as `dist.nodes` asks for."""
    led = os.environ.get(STORE)
    nodes = int(os.environ[NODES]) if led else config.dist.nodes
    size = nodes if config.dist.auto else config.dist.world_size
    if nodes > 1 and not led:
        how = "start this with: python -m pipeline lead dvc repro, and on the others: python -m pipeline join HOST"
        raise ConfigError(f"dist.nodes: {nodes} machines need a leader; {how}; or set nodes: 1")
    if size % nodes:
        raise ConfigError(f"dist.world_size: {size} ranks cannot be spread evenly over {nodes} machines; set it to a multiple of {nodes}")
    return config.model_copy(update={"dist": config.dist.model_copy(update={"nodes": nodes, "world_size": size})})
