"""The evaluate stage: the published model on the test images, each exactly once."""

import json
import logging
import os
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from pipeline.config import Config, ConfigError, DataError, digest
from pipeline.console import Progress
from pipeline.data import store, title
from pipeline.files import Paths, atomic_write
from pipeline.job import Job
from pipeline.plan import resolved
from pipeline.report import plots
from pipeline.runs.copy import fetch
from pipeline.runs.lock import run_lock
from pipeline.runs.object_storage import configured
from pipeline.stage import RankStage, errors_in_status, run_header
from pipeline.timeouts import lock_seconds
from pipeline.tracking.journal import Journal, last
from pipeline.tracking.mirror_process import server_and_credentials
from pipeline.tracking.receipt import Receipt, read_receipt

log = logging.getLogger(__name__)

TRAIN = "run: python -m pipeline train"


def run(config: Config, paths: Paths) -> int:
    """Evaluate the published model as it was trained; returns the exit code."""
    server_and_credentials(paths)
    configured()
    receipt = published(paths)
    manifest = store.read_manifest(paths.prepared)
    if manifest.digest != receipt.data_digest:
        raise DataError(f"{paths.prepared}: is not what {paths.models} was trained on; {TRAIN}")
    trained = trained_with(receipt, paths)
    # The model as it was trained, on the ranks that are asked for now.
    threads = {"threads_per_rank": trained.dist.threads_per_rank}
    config, placement = resolved(trained.model_copy(update={"dist": config.dist.model_copy(update=threads)}))
    store.verify(paths.prepared, manifest, ("test",))
    run = paths.runs / receipt.fingerprint
    job = _on_those_that_are_there(
        Job(
            config=config,
            device=placement.device,
            backend=placement.backend,
            precision=receipt.precision,
            prepared=paths.prepared,
            run=run,
            weights=paths.models / "model.safetensors",
        )
    )
    with run_lock(run / "lock", lock_seconds(config.dist.grace_seconds)) as lock, errors_in_status(job, "evaluate", paths):
        # Or a training here would take what it begins for all that there is.
        fetch(run, log.info)
        job.result.unlink(missing_ok=True)

        def finish(journal: Journal, _: Callable[[], str | None]) -> str:
            return report(job, paths, manifest, receipt, journal)

        first_line = run_header(trained, f"{trained.model.name} on {manifest.name} {receipt.fingerprint[:6]}", manifest)
        first_line["id"] = receipt.journal
        tags: dict[str, Any] = {"dvc.experiment": os.environ.get("DVC_EXP_NAME")}
        return RankStage("evaluate", job, paths, lock).run(
            "pipeline.training.evaluate_rank", first_line, tags, Progress(job.journal, 1, 1), finish
        )


def _on_those_that_are_there(job: Job) -> Job:
    """Return the same job on the machines that an elastic training has left."""
    if not job.elastic or job.config.dist.nodes == 1:
        return job
    # torch is imported only where there is a leader.
    from pipeline.cluster.leader import on_those_that_are_there

    return job.model_copy(update={"config": on_those_that_are_there(job.config, log.info)})


def trained_with(receipt: Receipt, paths: Paths) -> Config:
    """Return the parameters in a receipt; raises DataError if code that it holds is not what its fingerprint was made of."""
    try:
        trained = Config.model_validate(receipt.parameters)
    except ValidationError:
        raise DataError(f"{paths.models / 'receipt.json'}: is from another version of this code (parameters); {TRAIN}") from None
    named = receipt.fingerprint, trained.identity("", "", "")["model"]
    if trained.model.source is not None and (digest(receipt.identity)[:16], receipt.identity.get("model")) != named:
        raise DataError(f"{paths.models / 'receipt.json'}: its model is not the code that was trained with; {TRAIN}")
    return trained


def published(paths: Paths) -> Receipt:
    """Return the receipt beside the model; raises DataError if it does not belong to that model."""
    path, model = paths.models / "receipt.json", paths.models / "model.safetensors"
    if not path.exists():
        raise ConfigError(f"{path}: no such file; {TRAIN}")
    receipt = read_receipt(path, TRAIN)
    sha256 = store.sha256(model) if model.is_file() else "nothing"
    if sha256 != receipt.model_sha256:
        raise DataError(f"{model}: expected SHA-256 {receipt.model_sha256}, found {sha256}; {TRAIN}")
    return receipt


def report(job: Job, paths: Paths, manifest: store.Manifest, receipt: Receipt, journal: Journal) -> str:
    """Write metrics and plots, and journal both; returns the result in one line."""
    class_names = manifest.class_names
    figures: dict[str, Any] = json.loads(job.result.read_text())
    confusion, predictions = figures.pop("confusion"), figures.pop("predictions")
    per_class = {
        name: row[index] / sum(row) if sum(row) else 0.0 for index, (name, row) in enumerate(zip(class_names, confusion, strict=True))
    }
    folder = job.run / "plots"
    atomic_write(job.run / "eval.json", (json.dumps(figures | {"class_accuracy": per_class}, indent=2) + "\n").encode())
    plots.confusion(confusion, class_names, folder)
    plots.class_accuracy(per_class, folder)
    split = store.open_split(job.prepared, "test")
    plots.predictions(predictions, split.labels.tolist(), class_names, job.run)
    plots.worst(predictions, split, class_names, folder)
    atomic_write(paths.metrics / "eval.json", (job.run / "eval.json").read_bytes())
    # Not `metrics`, which keeps what a step had before: the newest evaluation counts.
    journal.event("metrics", step=receipt.best.step, values={f"test/{name}": value for name, value in figures.items()})
    for name in ("eval.json", "predictions.csv"):
        journal.event("artifact", path=name, folder=None)
    for path in sorted(path for kind in ("confusion", "classes", "worst") for path in folder.glob(f"{kind}.*")):
        atomic_write(paths.plots / path.name, path.read_bytes())
        journal.event("artifact", path=path.relative_to(job.run).as_posix(), folder="plots")
    describe(journal, job, figures)
    # Whose code nobody can look up is not to be promoted.
    clean = bool(receipt.git.get("commit")) and receipt.git.get("dirty") is False
    tests = digest([sha256 for name, sha256 in sorted(manifest.sha256.items()) if name.startswith("test-")])
    told = {"accuracy": figures["accuracy"], "clean": clean, "tests": tests[:16], "step": receipt.best.step}
    journal.event("evaluated", model=title(receipt.parameters["data"]), **told)
    return f"test accuracy {figures['accuracy']:.4f} ({figures['correct']} of {figures['total']}), loss {figures['loss']:.4f}"


def describe(journal: Journal, job: Job, figures: dict[str, Any]) -> None:
    """Add the test accuracy to what people read first of this run, and the confusion matrix."""
    before = last(job.journal, "description")
    if before:
        rows = [row for row in before["text"].splitlines() if not row.startswith("| test accuracy |")]
        rows.append(f"| test accuracy | {figures['accuracy']:.4f} ({figures['correct']} of {figures['total']}) |")
        own = ["plots/confusion.png", "plots/worst.png"]
        journal.event("description", text="\n".join(rows), images=[*(path for path in before["images"] if path not in own), *own])
