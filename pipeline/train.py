"""The train stage: the same experiment is never trained twice, a stopped one goes on, a finished one is published."""

import json
import logging
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import Config, MachineError, own_code
from pipeline.console import Progress
from pipeline.data import store
from pipeline.files import Paths, atomic_folder, atomic_write
from pipeline.hardware import machine
from pipeline.hardware.placement import said_of_fewer, slow_on_cpus
from pipeline.job import Job
from pipeline.plan import Plan, plan
from pipeline.report import plots
from pipeline.runs import checkpoints, copy_process, status
from pipeline.runs.copy import fetch
from pipeline.runs.identity import versions, write_identity
from pipeline.runs.lock import run_lock
from pipeline.runs.object_storage import configured
from pipeline.runs.resume import import_run
from pipeline.runs.status import StopRequested
from pipeline.stage import RankStage, errors_in_status, run_header
from pipeline.stop_signals import deferred
from pipeline.timeouts import lock_seconds
from pipeline.tracking import journal as journals
from pipeline.tracking import receipt as receipts
from pipeline.tracking.journal import CHECKPOINT, LANES, RANKS, Journal
from pipeline.tracking.mirror_process import MirrorProcess, needs_sync, server_and_credentials
from pipeline.tracking.mirror_state import read_state
from pipeline.tracking.receipt import Receipt

log = logging.getLogger(__name__)


def run(config: Config, paths: Paths, resume: Path | None = None, stop_after_epochs: int | None = None, command: str | None = None) -> int:
    """Train, or publish what was trained before; returns the exit code. `command` is what goes on, if it is not `train`."""
    server_and_credentials(paths)
    configured()
    planned = plan(config, paths, stop_after_epochs)
    job, name = planned.job, planned.job.run.name
    with run_lock(job.run / "lock", lock_seconds(config.dist.grace_seconds)) as lock, errors_in_status(job, "train", paths):
        fetch(job.run, log.info)
        check_journal(job.journal, name)
        if planned.done:
            publish_again(job, paths)
            return 0
        if job.until and planned.has_reached(job.until):
            copy_process.complete(job.run, log.info)
            log.info("stopped behind epoch %d already: %s", stop_after_epochs, checkpoints.newest(job.run))
            return status.STOPPED
        store.verify(paths.prepared, planned.manifest, ("train", "validation"))
        write_identity(job.run, planned.identity)
        imported = import_run(resume, job, planned.identity, header(job, name)) if resume else None
        progress = Progress(job.journal, planned.steps, planned.steps_per_epoch, job.until)
        progress.say(what_begins(job, planned.manifest.name))
        if fewer := said_of_fewer(config.dist, job.config.dist):
            progress.say(fewer)
        for slow in slow_on_cpus(job.config.dist, planned.placement, machine.detect()) if job.device == "cpu" else ():
            progress.say("; ".join(slow))
        if imported:
            progress.say(imported)
        if config.dist.elastic and (why := job.why_not_elastic):
            progress.say(f"dist.elastic: {why}; where one rank is lost, all start again from the newest checkpoint")
        own = own_code.files(paths.root, config.model.name, config.data.name)
        facts = facts_of(planned, receipts.git_state(own=own))
        stage = RankStage("train", job, paths, lock, command=command)
        code = carry_out(stage, job, paths, progress, facts)
    if code == status.STOPPED and job.until and stage.stop_requested:
        # It was to stop there anyway; whoever called it is to stop, too.
        raise StopRequested(f"stopped on request, behind step {job.until}")
    return code


def what_begins(job: Job, data: str) -> str:
    """The first line for people."""
    dist, kept = job.config.dist, checkpoints.newest(job.run)
    lacks = journals.last(job.journal, "started") and not journals.last(job.journal, CHECKPOINT)
    batch = f"global batch {dist.images_per_step}" + (f" in {dist.lanes} lanes" if dist.lanes else "")
    where = f"{dist.world_size} x {job.device}, {job.backend}, {job.precision}, {batch}" + (", elastic" if job.elastic else "")
    origin = f", going on from {kept}" if kept else ", from step 0 again: no checkpoint was written yet" if lacks else ""
    return f"training {job.config.model.name} on {data}: {where}, run {job.run.name}{origin}"


def check_journal(journal: Path, name: str) -> None:
    """Raise MachineError if a journal was started as another experiment's."""
    for line in journals.read(journal):
        owner = line["tags"].get("lockstep.fingerprint", name) if line["kind"] == "started" else name
        if owner != name:
            raise MachineError(f"{journal}: is that of run {owner}; move {journal.parent} away to train again")


def publish_again(job: Job, paths: Paths) -> None:
    """Publish a finished run once more, and let MLflow catch up with it."""
    receipt = publish(job.run, paths)
    # A kill may have come before it could say so, and a failed evaluation after it.
    status.Outcome("done", 0, "", None, receipt.steps, checkpoints.newest(job.run), "").write(job.run)
    log.info("finished already, published again: %s, MLflow run %s", job.run, receipt.mlflow_run_id or read_state(job.run).run_id)
    log.info("trained before, last with world size %s", receipt.placement.get("world_size"))
    for line in what_came_out(receipt):
        log.info("%s", line)
    if needs_sync(job.run, paths):
        # Whoever finished it was killed before MLflow had heard.
        with deferred() as signalled:
            error = MirrorProcess(job.run, paths).finish(signalled, log.info)
        log.info("MLflow %s", f"does not have all of it yet ({error})" if error else "has caught up with it")
    copy_process.complete(job.run, log.info)


def what_came_out(receipt: Receipt) -> list[str]:
    """Return the result in lines for people."""
    best = f"best validation accuracy {receipt.best.validation_accuracy:.4f} in epoch {receipt.best.epoch}"
    return [best, f"SHA-256 of the weights after the last step: {receipt.weights_sha256}"]


def carry_out(stage: RankStage, job: Job, paths: Paths, progress: Progress, facts: dict[str, Any]) -> int:
    """Start the ranks; when they are done, complete the receipt and publish."""

    def finish(journal: Journal, run_id: Callable[[], str | None]) -> str:
        placement = dict(facts["placement"])
        if job.config.dist.lanes_per_rank == "auto":
            placement["lanes_per_rank"] = journals.last(job.journal, LANES)["per_rank"]
        if groups := [[line["step"], line["ranks"]] for line in journals.read(job.journal) if line["kind"] == RANKS]:
            placement["ranks_since_step"] = groups
        write_receipt(job, facts | {"placement": placement, "mlflow_run_id": run_id()})
        receipt = publish(job.run, paths)
        journal_results(journal, job, receipt)
        return "\n".join(what_came_out(receipt))

    module = f"pipeline.{'elastic' if job.elastic else 'training'}.train_rank"
    return stage.run(module, header(job, facts["fingerprint"]), receipts.tags(facts), progress, finish)


def header(job: Job, fingerprint: str) -> dict[str, Any]:
    """The first line of the journal."""
    title = f"{job.config.model.name} on {job.config.data.name} {fingerprint[:6]}"
    return run_header(job.config, title, store.read_manifest(job.prepared))


def facts_of(planned: Plan, git: dict[str, Any]) -> dict[str, Any]:
    """Return what a receipt says before anything ran."""
    config, placement = planned.job.config, planned.placement
    return {
        "fingerprint": planned.job.run.name,
        "identity": planned.identity,
        "git": git,
        "parameters": config.model_dump(),
        "data_digest": planned.manifest.digest,
        "image": receipts.image(),
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


def write_receipt(job: Job, facts: dict[str, Any]) -> None:
    """Complete the receipt with what was learned, in the run's folder."""
    finished = journals.last(job.journal, "finished")
    ends = receipts.epochs(job.journal)
    learned = {
        "weights_sha256": finished["weights_sha256"],
        "model_sha256": store.sha256(job.run / "model.safetensors"),
        "steps": finished["step"],
        "best": receipts.best_epoch(ends),
        "epochs": ends,
        "journal": journals.last(job.journal, "run")["id"],
        "elapsed_seconds": receipts.elapsed_seconds(job.journal),
    }
    atomic_write(job.run / "receipt.json", (json.dumps(learned | facts, indent=2) + "\n").encode())


def publish(run: Path, paths: Paths) -> Receipt:
    """Put a finished run's outs in place; returns its receipt."""
    cure = f"move {run} away to train again"
    receipt = receipts.read_receipt(run / "receipt.json", cure)
    model = run / "model.safetensors"
    sha256 = store.sha256(model) if model.is_file() else "nothing"
    if sha256 != receipt.model_sha256:
        raise MachineError(f"{model}: expected SHA-256 {receipt.model_sha256}, found {sha256}; {cure}")
    with atomic_folder(paths.models) as scratch:
        for name in ("model.safetensors", "receipt.json"):
            shutil.copyfile(run / name, scratch / name)
    last = receipt.epochs[-1]
    metrics = {
        "best": {"epoch": receipt.best.epoch, "validation_accuracy": receipt.best.validation_accuracy},
        "last": {"train_loss": float.fromhex(last.train_loss), "validation_loss": float.fromhex(last.validation_loss)},
        "steps": receipt.steps,
    }
    atomic_write(paths.metrics / "train.json", (json.dumps(metrics, indent=2) + "\n").encode())
    plots.curves(run / "journal.jsonl", run / "plots")
    for path in (run / "plots").glob("curves.*"):
        atomic_write(paths.plots / path.name, path.read_bytes())
    return receipt


def described(job: Job, receipt: Receipt, step_time: str) -> str:
    """Return what people read first of a finished run, as Markdown."""
    best, dist = receipt.best, job.config.dist
    rows = {
        "best validation accuracy": f"{best.validation_accuracy:.4f} in epoch {best.epoch} of {job.config.train.epochs}",
        "model and data": f"{job.config.model.name} on {job.config.data.name}",
        "steps": f"{receipt.steps} of {dist.images_per_step} images, {job.precision}, {dist.strategy}, {dist.reduction}",
        **({"computing a step, in the median": step_time} if step_time else {}),
        "SHA-256 of the weights": f"`{receipt.weights_sha256}`",
        "fingerprint": f"`{receipt.fingerprint}`; compute it again: `python -m pipeline verify runs/{receipt.fingerprint}`",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def journal_results(journal: Journal, job: Job, receipt: Receipt) -> None:
    """Journal what MLflow gets of a finished run."""
    atomic_write(job.run / "params.yaml", yaml.safe_dump(job.config.model_dump(exclude={"model": {"source"}}), sort_keys=False).encode())
    best = {"best/validation_accuracy": receipt.best.validation_accuracy, "best/epoch": receipt.best.epoch}
    journal.metrics(best, receipt.best.step)
    journal.metrics({"total/hours": receipts.elapsed_seconds(job.journal) / 3600}, receipt.steps)
    journal.event("tags", tags={"lockstep.weights_sha256": receipt.weights_sha256})
    step_time = plots.step_times(job.journal, job.run / "plots")
    files = [path.relative_to(job.run).as_posix() for stem in ("curves", "ranks") for path in sorted((job.run / "plots").glob(f"{stem}.*"))]
    journal.event("description", text=described(job, receipt, step_time), images=[path for path in files if path.endswith(".png")])
    for name in ("receipt.json", "params.yaml"):
        journal.event("artifact", path=name, folder=None)
    for path in files:
        journal.event("artifact", path=path, folder="plots")
    # Once more: a rank may have been killed between its last checkpoint and the line behind it.
    journal.event(CHECKPOINT, step=receipt.steps)
    manifest = store.read_manifest(job.prepared)
    if (job.run / "model.pt2").is_file():
        journal.event("model", path="model.pt2", shape=manifest.shape, classes=manifest.class_names, precision=job.precision)
