"""Go on from a run that is named by hand: the same experiment under any strategy, and under `native` also on another placement."""

import hashlib
import json
import os
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.config import ConfigError
from pipeline.files import atomic_folder, fsync_path, read_checksummed_json, write_checksummed_json
from pipeline.job import Job
from pipeline.runs import checkpoints
from pipeline.runs.identity import IDENTITY, flatten
from pipeline.runs.lock import run_lock
from pipeline.tracking import journal as journals
from pipeline.tracking.journal import CHECKPOINT, Journal
from pipeline.tracking.mirror_state import read_state, write_state

# What under `native` is part of the identity, as it changes the bits, but not what is learned from which samples.
PLACEMENT = {"dist.world_size", "dist.nodes", "dist.accumulation", "dist.backend", "dist.replicas", "dist.algorithm"}


def import_run(source: Path, job: Job, identity: dict[str, Any], header: dict[str, Any]) -> str | None:
    """Take over another run's checkpoints and figures; returns a line for people. Raises ConfigError if it is another experiment."""
    if source.resolve() == job.run.resolve():
        return None
    try:
        then = flatten(json.loads((source / IDENTITY).read_bytes()))
    except (OSError, ValueError, AttributeError, RecursionError):
        raise ConfigError(f"--resume: {source} is no folder of a run; name one such as runs/0123456789abcdef") from None
    now = flatten(identity)
    differing = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
    native = then.get("dist.reduction") == now.get("dist.reduction") == "native"
    only_one_has = {key for key in differing if key.startswith("source.") and None in (then.get(key), now.get(key))}
    of_strategy = {"dist.strategy", *only_one_has} if "dist.strategy" in differing else set[str]()
    hindering = [key for key in differing if key not in of_strategy and not (native and key in PLACEMENT)]
    if hindering:
        named = "; ".join(f"{key}: {then.get(key)!r} there, {now.get(key)!r} here" for key in hindering)
        raise ConfigError(f"--resume: {source} is another experiment ({named}); without --resume this one trains from its own checkpoints")
    if checkpoints.newest(job.run):
        return f"this run has checkpoints of its own and goes on from them, not from {source}"
    with run_lock(source / "lock"):
        newest = checkpoints.newest(source)
        if newest is None:
            raise ConfigError(f"--resume: {source} has no good checkpoint; without --resume this trains from the beginning")
        copy_until(source, job, checkpoints.step_of(Path(newest)), header)
    if not differing:
        return f"going on from {newest}"
    changed = ", ".join(f"{key} {then.get(key)} -> {now.get(key)}" for key in differing if key not in only_one_has)
    bits = "`native` sums in another order there, so the bits are those of neither" if native else "with the same bits"
    return f"going on from {newest} with {changed}: the same samples in the same order, none twice and none left out; {bits}"


def copy_until(source: Path, job: Job, step: int, header: dict[str, Any]) -> None:
    """The checkpoints up to a step, and every figure up to it; a kill in between leaves none of it believed."""
    partial = job.run / ".journal.jsonl.partial"
    partial.unlink(missing_ok=True)
    journal = Journal(partial)
    tags = header["tags"] | {"lockstep.resumed_from": source.name}
    # A start that saved nothing may have begun a run in MLflow, whose parameters stay: that goes on.
    begun = journals.last(job.journal, "run")
    kept = {name: begun[name] for name in ("id", "params") if begun}
    journal.event("run", **({"id": uuid.uuid4().hex} | header | {"tags": tags} | kept))
    for line in journals.read(source / "journal.jsonl"):
        if line["kind"] in ("metrics", CHECKPOINT) and line["step"] <= step:
            journal.event(line["kind"], **{name: value for name, value in line.items() if name != "kind"})
    journal.sync()
    journal.close()
    content = partial.read_bytes()
    with atomic_folder(job.checkpoints) as scratch:
        shutil.copytree(source / "checkpoints", scratch, dirs_exist_ok=True)
        index = read_checksummed_json(scratch / "index.json")
        if index is None:
            # It is rebuilt from the files, and may not come back from the other run's journal.
            (scratch / "index.json").unlink(missing_ok=True)
        else:
            covered = [len(content), hashlib.sha256(content).hexdigest()]
            # A later one was refused there: its figures are not in this journal either.
            entries = [entry | {"journal": covered} for entry in index["checkpoints"] if entry["step"] <= step]
            best = {name: entry for name, entry in index.items() if name == "best" and entry["step"] <= step}
            write_checksummed_json(scratch / "index.json", {"checkpoints": entries} | best)
    # MLflow gets it from its beginning, whatever it has of the one before.
    write_state(job.run, replace(read_state(job.run), offset=0))
    os.replace(partial, job.journal)
    fsync_path(job.run)
