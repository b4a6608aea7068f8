"""The verify command: a result is computed once more, whole or in part, and compared bit for bit."""

import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline import prepare
from pipeline.config import Config, ConfigError, DataError, MachineError
from pipeline.console import Progress
from pipeline.data import store
from pipeline.files import Paths
from pipeline.hardware.placement import Placement, said_of_fewer
from pipeline.job import Job, first_weights
from pipeline.plan import resolved
from pipeline.report import difference
from pipeline.report.difference import Difference
from pipeline.runs import checkpoints
from pipeline.runs.claim import RECEIPT, Claim, read_claim
from pipeline.runs.identity import flatten, run_identity
from pipeline.runs.lock import run_lock
from pipeline.runs.resume import copy_until
from pipeline.runs.status import STOPPED
from pipeline.stage import RankStage, run_header
from pipeline.timeouts import lock_seconds
from pipeline.tracking import journal as journals
from pipeline.tracking.journal import Journal
from pipeline.tracking.receipt import Receipt, best_epoch, epochs

EQUAL, DIVERGED, NOT_COMPARABLE = 0, 1, 4
# What an identity holds of the data.
DATA = ("prepared data", "source data")


@dataclass(frozen=True)
class Span:
    """The steps to compute again: behind `after`, up to `until`; whole if that is all of a finished run."""

    after: int
    until: int
    whole: bool


def run(_: Config, paths: Paths, result: Path | None, everything: bool, **asked: Any) -> int:
    """Verify one result, or all of `runs/`; 0 if every one has the same bits again."""
    results = sorted(path.parent for path in paths.runs.glob(f"*/{RECEIPT}")) if everything else [result or paths.models]
    if not results:
        raise ConfigError(f"{paths.runs}: no run is finished; run: python -m pipeline train")
    if not everything:
        return verified(read_claim(results[0], paths.runs), paths, **asked)
    codes: list[int] = []
    for one in results:
        try:
            codes.append(verified(read_claim(one, paths.runs), paths, **asked))
        except (ConfigError, DataError, MachineError) as error:
            # The others may be sound.
            print(error, file=sys.stderr)
            codes.append(error.exit_code)
        if codes[-1] == STOPPED:
            break
    return DIVERGED if DIVERGED in codes else max(codes)


def on_ranks(config: Config, world_size: int | None) -> Config:
    """The same experiment on another number of ranks of this machine."""
    if world_size is None:
        return config
    dist, placement = config.dist, dict[str, int | None]()
    if dist.reduction == "ordered" and world_size > dist.pieces:
        raise ConfigError(f"--world-size: {world_size} is more than the lanes of this result; give at most {dist.pieces}")
    if dist.reduction == "ordered":
        placement = {"batch_size_per_gpu": None, "global_batch": dist.images_per_step, "accumulation": 1, "lanes_per_rank": None}
    values = config.model_dump() | {"dist": dist.model_dump() | placement | {"world_size": world_size, "nodes": 1, "replicas": 1}}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"--world-size: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def placed(config: Config, world_size: int | None) -> tuple[Config, Placement]:
    """The same experiment where it is computed again; people hear if that is on fewer ranks than they asked for."""
    asked = on_ranks(config, world_size)
    found, placement = resolved(asked)
    if fewer := said_of_fewer(asked.dist, found.dist):
        print(fewer, file=sys.stderr)
    return found, placement


def verified(claim: Claim, paths: Paths, from_step: int, steps: int | None, world_size: int | None) -> int:
    """Compute it again and print the verdict; returns 0, 1 or 4."""
    config, placement = placed(claim.config, world_size)
    data = {name: claim.identity[name] for name in DATA if name in claim.identity}
    first = first_weights(config, paths.root)
    differing, source = differences(claim.identity, run_identity(config, placement, data, first))
    if differing:
        return verdict(claim, NOT_COMPARABLE, f"not comparable because {'; '.join(differing)}")
    with run_lock(claim.run / "lock", lock_seconds(config.dist.grace_seconds)) as lock, prepared_for(claim, paths) as prepared:
        manifest = store.read_manifest(prepared)
        differing, _ = differences(data, {name: manifest.identity[name] for name in data})
        if differing:
            return verdict(claim, NOT_COMPARABLE, f"not comparable because {'; '.join(differing)}")
        per_epoch = manifest.counts["train"] // config.dist.images_per_step
        span = span_of(claim, from_step, steps, per_epoch * config.train.epochs)
        check_files(claim)
        store.verify(prepared, manifest, ("train", "validation"), again=True)
        job = Job(
            config=config,
            device=placement.device,
            backend=placement.backend,
            precision=placement.precision,
            prepared=prepared,
            run=claim.run / "verify",
            until=span.until,
            first_weights=first,
        )
        code = computed(claim, span, RankStage("train", job, paths, lock, tracked=False), job, per_epoch)
        if code not in (0, STOPPED):
            # The ranks' logs say why.
            return code
        if journals.reached(job.journal, evaluated=False) == span.until:
            text, code = compared(claim, span, job)
        else:
            text = "stopped before the end, and so not compared"
        shutil.rmtree(job.run, ignore_errors=True)
    changed = f"; changed since: {', '.join(source)}" if source else ""
    return verdict(claim, code, f"{text}, on {config.dist.world_size} rank{'s' if config.dist.world_size > 1 else ''}{changed}")


@contextmanager
def prepared_for(claim: Claim, paths: Paths) -> Generator[Path]:
    """Yield a folder with its prepared data: those of the checkout, or else, as for another seed, some that are removed after the block."""
    try:
        is_here = store.read_manifest(paths.prepared).digest == claim.identity.get("prepared data")
    except DataError:
        is_here = False
    if is_here:
        yield paths.prepared
        return
    folder = claim.run / "verify-data"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        prepare.run(claim.config, paths, folder / "prepared")
        yield folder / "prepared"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def computed(claim: Claim, span: Span, stage: RankStage, job: Job, per_epoch: int) -> int:
    """Compute the steps of a span in a folder of their own; returns the ranks' exit code."""
    shutil.rmtree(job.run, ignore_errors=True)
    header = run_header(job.config, f"verify {claim.run.name}", store.read_manifest(job.prepared))
    if span.after:
        copy_until(claim.run, job, span.after, header)
    progress = Progress(job.journal, per_epoch * job.config.train.epochs, per_epoch, job.until)
    ranks = f"{job.config.dist.world_size} x {job.device}, {job.backend}, {job.precision}"
    progress.say(f"computing steps {span.after + 1} to {span.until} of {claim.name} again: {ranks}")
    return stage.run("pipeline.training.train_rank", header, {}, progress, nothing)


def nothing(_: Journal, __: Callable[[], str | None]) -> str:
    """Publish nothing: what is computed again is compared, and removed."""
    return ""


def figures_of(claim: Claim) -> difference.Figures:
    """Return what it learned at every step: what the receipt says goes before what the journal says."""
    figures = difference.learned(claim.run / "journal.jsonl")
    for end in claim.receipt.epochs if claim.receipt else ():
        losses = {"train/loss": float.fromhex(end.train_loss), "validation/loss": float.fromhex(end.validation_loss)}
        figures[end.step] = figures.get(end.step, {}) | losses | {"validation/accuracy": end.validation_accuracy}
    return figures


def verdict(claim: Claim, code: int, text: str) -> int:
    print(f"{claim.name}: {text}")
    return code


def differences(then: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what makes the bits differ, with both values; and the names of the modules that are others, which may keep the bits."""
    before, after = flatten(then), flatten(now)
    differing = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    source = [key.removeprefix("source.") for key in differing if key.startswith("source.")]
    return [f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in differing if not key.startswith("source.")], source


def span_of(claim: Claim, from_step: int, steps: int | None, total: int) -> Span:
    """Which steps are to be computed again; raises ConfigError if they cannot be, or if there is nothing to compare them with."""
    index = checkpoints.read_index(claim.run / "checkpoints") or {"checkpoints": []}
    kept = [entry["step"] for entry in index["checkpoints"]]
    if from_step and from_step not in kept:
        raise ConfigError(f"--from-step: {claim.run} has no checkpoint of step {from_step}; it has those of {kept or 'none'}")
    most = total if claim.receipt else max(kept, default=0)
    until = min(from_step + steps, most) if steps else most
    compared = difference.shared(figures_of(claim), from_step, until) + sum(from_step < step <= until for step in kept)
    if not compared:
        raise ConfigError(f"--from-step, --steps: {claim.name} has nothing to compare behind step {from_step} up to {until}; name others")
    return Span(from_step, until, whole=claim.receipt is not None and until == total)


def check_files(claim: Claim) -> None:
    """Raise DataError if a file of the run is not what was written."""
    folder = claim.run / "checkpoints"
    index = checkpoints.read_index(folder)
    damaged: list[str] = []
    for entry in checkpoints.listed(index) if index else ():
        checkpoints.intact(folder, entry, damaged.append)
    if damaged:
        raise DataError(f"{damaged[0]}; nothing was computed")
    model = Path(claim.name).with_name("model.safetensors")
    if claim.receipt and model.is_file() and (found := store.sha256(model)) != claim.receipt.model_sha256:
        raise DataError(f"{model}: its SHA-256 is {found}, and in the receipt {claim.receipt.model_sha256}; nothing was computed")


def compared(claim: Claim, span: Span, job: Job) -> tuple[str, int]:
    """Return the verdict in words and as an exit code."""
    figures, pairs = figures_of(claim), difference.checkpoints(claim.run / "checkpoints", job.checkpoints, span.after, span.until)
    found = [
        difference.in_figures(figures, difference.learned(job.journal), span.after, span.until),
        difference.in_tensors(pairs),
        in_digests(claim.receipt, job) if claim.receipt and span.whole else None,
    ]
    differing = sorted((one for one in found if one is not None), key=lambda one: one.step)
    if differing:
        step = differing[0].step
        return f"diverged at step {step}: " + "; ".join(
            one.text + (f" (step {one.step})" if one.step > step else "") for one in differing
        ), DIVERGED
    count = f"{difference.shared(figures, span.after, span.until)} figures of steps {span.after + 1} to {span.until}"
    saved = [f"all tensors of step {step}" for step, _, _ in pairs]
    return "bit-equal: " + ", ".join([count, *saved, *(["both digests"] if span.whole else [])]), EQUAL


def in_digests(receipt: Receipt, job: Job) -> Difference | None:
    """Return what of a receipt's last lines is another one."""
    finished = journals.last(job.journal, "finished")
    now: dict[str, Any] = {
        "weights_sha256": finished["weights_sha256"],
        "model_sha256": store.sha256(job.run / "model.safetensors"),
        "steps": finished["step"],
        "best": best_epoch(epochs(job.journal)),
    }
    then = receipt.model_dump()
    differing = [f"{name}: {then[name]} there, {value} here" for name, value in now.items() if then[name] != value]
    return Difference(finished["step"], "; ".join(differing)) if differing else None
