"""The evaluate stage: the published model on the test images, each exactly once."""

import json
import os
import re
from typing import Any

from pipeline.config import Config, ConfigError, DataError
from pipeline.console import Progress
from pipeline.data import store
from pipeline.files import Paths, atomic_write
from pipeline.hardware import machine
from pipeline.hardware.placement import resolve
from pipeline.job import Job
from pipeline.launch.node import resolve_num_nodes
from pipeline.report import plots
from pipeline.runs.lock import run_lock
from pipeline.stage import RankStage, run_header
from pipeline.timeouts import lock_seconds
from pipeline.tracking.journal import Journal


def run(config: Config, paths: Paths) -> int:
    """Evaluate what models/ holds, as it was trained; returns the exit code."""
    proof = read_receipt(paths)
    manifest = store.read_manifest(paths.prepared)
    if manifest.digest != proof["data_digest"]:
        raise DataError(f"{paths.prepared}: is not what {paths.models} was trained on; run: python -m pipeline train")
    trained = Config.model_validate(proof["parameters"])
    # The model as it was trained, on the ranks that are asked for now.
    threads = {"threads_per_rank": trained.dist.threads_per_rank}
    config = resolve_num_nodes(trained.model_copy(update={"dist": config.dist.model_copy(update=threads)}))
    placement = resolve(config, machine.detect())
    store.verify(paths.prepared, manifest, ("test",))
    run = paths.runs / proof["fingerprint"]
    job = Job(
        config=config,
        device=placement.device,
        backend=placement.backend,
        precision=proof["precision"],
        prepared=paths.prepared,
        run=run,
        weights=paths.models / "model.safetensors",
    )
    with run_lock(run / "lock", lock_seconds(config.dist.grace_seconds)) as lock:
        job.result.unlink(missing_ok=True)

        def finish(journal: Journal, run_id: str | None) -> str:
            return report(job, paths, manifest.class_names, proof["best"]["step"], journal)

        first_line = run_header(trained, f"{trained.model.name} on {manifest.name} {proof['fingerprint'][:6]}")
        first_line["id"] = proof["journal"]
        tags: dict[str, Any] = {"dvc.experiment": os.environ.get("DVC_EXP_NAME")}
        return RankStage("evaluate", job, paths, lock).run(
            "pipeline.training.evaluate_rank", first_line, tags, Progress(job.journal, 1, 1), finish
        )


def read_receipt(paths: Paths) -> dict[str, Any]:
    """The receipt beside the model, if it belongs to that model."""
    path = paths.models / "receipt.json"
    if not path.exists():
        raise ConfigError(f"{path}: no such file; run: python -m pipeline train")
    proof: dict[str, Any] = json.loads(path.read_text())
    model = paths.models / "model.safetensors"
    found = store.sha256(model) if model.exists() else "nothing"
    if not re.fullmatch("[0-9a-f]{16}", str(proof["fingerprint"])):
        # It names a folder of runs/.
        raise DataError(f"{path}: {proof['fingerprint']!r} is no fingerprint; run: python -m pipeline train")
    if found != proof["model_sha256"]:
        raise DataError(f"{model}: expected SHA-256 {proof['model_sha256']}, found {found}; run: python -m pipeline train")
    return proof


def report(job: Job, paths: Paths, class_names: list[str], step: int, journal: Journal) -> str:
    """Metrics, plots, and the same in the journal; what to tell people."""
    found: dict[str, Any] = json.loads(job.result.read_text())
    confusion = found.pop("confusion")
    per_class = {
        name: row[index] / sum(row) if sum(row) else 0.0 for index, (name, row) in enumerate(zip(class_names, confusion, strict=True))
    }
    folder = job.run / "plots"
    atomic_write(job.run / "eval.json", (json.dumps(found | {"class_accuracy": per_class}, indent=2) + "\n").encode())
    plots.confusion(confusion, class_names, folder)
    plots.class_accuracy(per_class, folder)
    atomic_write(paths.metrics / "eval.json", (job.run / "eval.json").read_bytes())
    # Not `metrics`, which keeps what a step had before: the newest evaluation counts.
    journal.event("metrics", step=step, values={f"test/{name}": value for name, value in found.items()})
    journal.event("artifact", path="eval.json", folder=None)
    for path in [*sorted(folder.glob("confusion.*")), *sorted(folder.glob("classes.*"))]:
        atomic_write(paths.plots / path.name, path.read_bytes())
        journal.event("artifact", path=path.relative_to(job.run).as_posix(), folder="plots")
    return f"test accuracy {found['accuracy']:.4f} ({found['correct']} of {found['total']}), loss {found['loss']:.4f}"
