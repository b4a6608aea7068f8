"""The train stage: the same experiment is never trained twice, a stopped one goes on, a finished one is published."""

import json
import logging
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import Config, ConfigError, MachineError
from pipeline.console import Progress
from pipeline.data import store
from pipeline.files import Paths, atomic_folder, atomic_write
from pipeline.hardware import machine
from pipeline.hardware.placement import Placement, resolve
from pipeline.job import Job
from pipeline.launch.node import resolve_num_nodes
from pipeline.report import plots
from pipeline.runs import checkpoints
from pipeline.runs.identity import fingerprint, run_identity, versions, write_identity
from pipeline.runs.lock import run_lock
from pipeline.runs.resume import import_run
from pipeline.stage import RankStage, run_header
from pipeline.timeouts import lock_seconds
from pipeline.tracking import journal as journals
from pipeline.tracking import receipt
from pipeline.tracking.journal import Journal
from pipeline.tracking.mirror_process import MirrorProcess, is_behind
from pipeline.tracking.mirror_state import read_state

log = logging.getLogger(__name__)


def run(config: Config, paths: Paths, resume: Path | None = None) -> int:
    """Train, or recognise that it is done; returns the exit code."""
    config = resolve_num_nodes(config)
    placement = resolve(config, machine.detect())
    manifest = store.read_manifest(paths.prepared)
    store.check_made_for(paths.prepared, manifest, config)
    steps_per_epoch = manifest.counts["train"] // config.dist.global_batch
    if steps_per_epoch == 0:
        counted = f"{manifest.counts['train']} training images do not fill a global batch of {config.dist.global_batch}"
        raise ConfigError(f"dist.batch_size_per_gpu: {counted}; lower it")
    identity = run_identity(config, placement, manifest.digest)
    name = fingerprint(identity)
    job = Job(
        config=config,
        device=placement.device,
        backend=placement.backend,
        precision=placement.precision,
        prepared=paths.prepared,
        run=paths.runs / name,
    )
    with run_lock(job.run / "lock", lock_seconds(config.dist.grace_seconds)) as lock:
        if any(line["stage"] == "train" and line["outcome"] == "done" for line in journals.read(job.journal) if line["kind"] == "ended"):
            publish_again(job, paths)
            return 0
        store.verify(paths.prepared, manifest, ("train", "validation"))
        write_identity(job.run, identity)
        title = f"{config.model.name} on {config.data.name} {name[:6]}"
        imported = import_run(resume, job, identity, run_header(config, title)) if resume else None
        progress = Progress(job.journal, steps_per_epoch * config.train.epochs, steps_per_epoch)
        where = f"{config.dist.world_size} x {placement.device}, {placement.backend}, {placement.precision}"
        kept = checkpoints.newest(job.run)
        progress.say(f"training {config.model.name} on {manifest.name}: {where}, run {name}" + (f", going on from {kept}" if kept else ""))
        if imported:
            progress.say(imported)
        return carry_out(job, paths, lock, progress, facts(config, placement, manifest, name, receipt.git_state()))


def publish_again(job: Job, paths: Paths) -> None:
    """A finished run once more."""
    publish(job.run, paths)
    proof = json.loads((job.run / "receipt.json").read_text())
    log.info("finished already, published again: %s, MLflow run %s", job.run, proof["mlflow_run_id"] or read_state(job.run).run_id)
    if is_behind(job.run, paths):
        # Whoever finished it was killed before MLflow had heard.
        wrong = MirrorProcess(job.run, paths).finish()
        log.info("MLflow %s", f"does not have all of it yet ({wrong})" if wrong else "has caught up with it")


def carry_out(job: Job, paths: Paths, lock: int, progress: Progress, proof: dict[str, Any]) -> int:
    """Start the ranks; when they are done, complete the receipt and publish."""

    def finish(journal: Journal, run_id: str | None) -> str:
        write_receipt(job, proof | {"mlflow_run_id": run_id})
        publish(job.run, paths)
        journal_artifacts(journal, job)
        best = receipt.best_epoch(receipt.epochs(job.journal))
        return f"best validation accuracy {best['validation_accuracy']:.4f} in epoch {best['epoch']}"

    name = f"{job.config.model.name} on {job.config.data.name} {proof['fingerprint'][:6]}"
    return RankStage("train", job, paths, lock).run(
        "pipeline.training.train_rank", run_header(job.config, name), tags(proof), progress, finish
    )


def tags(proof: dict[str, Any]) -> dict[str, Any]:
    """What MLflow's runs are searched by."""
    return {
        "lockstep.fingerprint": proof["fingerprint"],
        "lockstep.data_digest": proof["data_digest"],
        "lockstep.world_size": proof["placement"]["world_size"],
        "lockstep.backend": proof["placement"]["backend"],
        "lockstep.device": proof["device"],
        "lockstep.precision": proof["precision"],
        "lockstep.seed": proof["parameters"]["seed"],
        "lockstep.image": proof["image"],
        "mlflow.source.git.commit": proof["git"]["commit"],
        "lockstep.dirty": proof["git"]["dirty"],
        "dvc.experiment": os.environ.get("DVC_EXP_NAME"),
    }


def facts(config: Config, placement: Placement, manifest: store.Manifest, name: str, git: dict[str, Any]) -> dict[str, Any]:
    """What a receipt says before anything ran."""
    return {
        "fingerprint": name,
        "git": git,
        "parameters": config.model_dump(),
        "data_digest": manifest.digest,
        "image": receipt.image(),
        "versions": versions(config, placement.device, placement.backend) | {"mlflow": _version("mlflow"), "dvc": _version("dvc")},
        "device": placement.device_kind,
        "placement": {
            "world_size": config.dist.world_size,
            "nodes": config.dist.nodes,
            "backend": placement.backend,
            "lanes_per_rank": config.dist.pieces_per_rank,
        },
        "precision": placement.precision,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


def write_receipt(job: Job, proof: dict[str, Any]) -> None:
    """Complete the receipt with what was learned, in the run's folder."""
    finished = journals.last(job.journal, "finished")
    ends = receipt.epochs(job.journal)
    learned = {
        "weights_sha256": finished["weights_sha256"],
        "model_sha256": store.sha256(job.run / "model.safetensors"),
        "steps": finished["step"],
        "best": receipt.best_epoch(ends),
        "epochs": ends,
        "journal": journals.last(job.journal, "run")["id"],
        "elapsed_seconds": receipt.elapsed_seconds(job.journal),
    }
    atomic_write(job.run / "receipt.json", (json.dumps(learned | proof, indent=2) + "\n").encode())


def publish(run: Path, paths: Paths) -> None:
    """Put a finished run's outs in place."""
    proof = json.loads((run / "receipt.json").read_text())
    found = store.sha256(run / "model.safetensors")
    if found != proof["model_sha256"]:
        raise MachineError(
            f"{run / 'model.safetensors'}: expected SHA-256 {proof['model_sha256']}, found {found}; remove {run} to train again"
        )
    with atomic_folder(paths.models) as scratch:
        for name in ("model.safetensors", "receipt.json"):
            shutil.copyfile(run / name, scratch / name)
    last = proof["epochs"][-1]
    metrics = {
        "best": {"epoch": proof["best"]["epoch"], "validation_accuracy": proof["best"]["validation_accuracy"]},
        "last": {"train_loss": float.fromhex(last["train_loss"]), "validation_loss": float.fromhex(last["validation_loss"])},
        "steps": proof["steps"],
    }
    atomic_write(paths.metrics / "train.json", (json.dumps(metrics, indent=2) + "\n").encode())
    plots.curves(run / "journal.jsonl", run / "plots")
    for path in (run / "plots").glob("curves.*"):
        atomic_write(paths.plots / path.name, path.read_bytes())


def journal_artifacts(journal: Journal, job: Job) -> None:
    """Tell MLflow's mirror what to keep."""
    proof = json.loads((job.run / "receipt.json").read_text())
    atomic_write(job.run / "params.yaml", yaml.safe_dump(job.config.model_dump(), sort_keys=False).encode())
    journal.metrics(
        {"best/validation_accuracy": proof["best"]["validation_accuracy"], "best/epoch": proof["best"]["epoch"]}, proof["best"]["step"]
    )
    journal.event("tags", tags={"lockstep.weights_sha256": proof["weights_sha256"]})
    for name in ("receipt.json", "params.yaml"):
        journal.event("artifact", path=name, folder=None)
    for path in [*sorted(job.checkpoints.glob("*.safetensors")), *sorted((job.run / "plots").glob("curves.*"))]:
        journal.event("artifact", path=path.relative_to(job.run).as_posix(), folder=path.parent.name)
    manifest = store.read_manifest(job.prepared)
    journal.event("model", path="model.pt2", shape=manifest.shape, num_classes=manifest.num_classes)
