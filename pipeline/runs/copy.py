"""A copy of a run in object storage, for machines whose disk goes with them: LOCKSTEP_COPY=s3://BUCKET/PREFIX.

Files are objects by their SHA-256, and one list names those of a run. It is replaced last, in one request, so whenever sending ends, the
list that is there names files that are there.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.config import ConfigError, MachineError
from pipeline.files import atomic_folder, atomic_write, checksummed_json, fsync_path, make_folder
from pipeline.runs import checkpoints
from pipeline.runs.identity import IDENTITY
from pipeline.tracking.journal import last

VARIABLE, JOURNAL, LIST = "LOCKSTEP_COPY", "journal.jsonl", "copy.json"
# What a start on another machine needs, beside journal and checkpoints; and what a finished run is published from.
NAMES = (IDENTITY, "params.yaml", "receipt.json", "model.safetensors", "model.pt2", "eval.json", "predictions.csv", "diverged.json")
CONNECT_SECONDS, READ_SECONDS = 5, 20


def configured() -> tuple[str, str] | None:
    """Return bucket and prefix, or None; raises ConfigError if it is not the address of a bucket."""
    said = os.environ.get(VARIABLE, "")
    found = re.fullmatch(r"s3://([A-Za-z0-9.\-_]{3,255})(?:/(.*?))?/*", said)
    if said and not found:
        raise ConfigError(f"{VARIABLE}: {said!r} is not the address of a bucket; write s3://BUCKET/PREFIX")
    return (found[1], found[2] or "") if found else None


@contextmanager
def one_line(doing: str) -> Generator[None]:
    """Raise MachineError for whatever object storage says, in one line."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise MachineError(f"{os.environ[VARIABLE]}: {doing}: {' '.join(str(error).split())}") from None


class Copy:
    """The copy of one run."""

    def __init__(self, run: Path, bucket: str, prefix: str, progress: Callable[[int], None] = lambda _: None):
        # Only here: who has no copy does not wait for this import.
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        for name in ("boto3", "botocore"):
            # They tell where they found credentials.
            logging.getLogger(name).setLevel(logging.WARNING)
        self._run, self._bucket, self._progress = run, bucket, progress
        self._prefix = f"{prefix}/{run.name}/" if prefix else f"{run.name}/"
        # We check what we fetch ourselves, and other stores than Amazon's know no checksums behind a body.
        sums: Any = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        limits = Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, retries={"total_max_attempts": 2}, **sums)
        self._transfer = TransferConfig(max_concurrency=2)
        with one_line("cannot be used"):
            self._client: Any = boto3.client("s3", config=limits)
        self._sent: dict[str, list[Any]] | None = None
        self._index: dict[str, Any] | None = None

    def send(self, ending: bool = False) -> None:
        """Make the copy what the run is now, if it has a new checkpoint or ends; raises MachineError if storage does not take it."""
        with one_line("does not take the copy"):
            if self._sent is None:
                self._sent = self._known()
            index = checkpoints.read_index(self._run / "checkpoints")
            if index is None or (index == self._index and not ending):
                return
            files = self._files(index)
            for name, (sha256, _) in files.items():
                if not any(sha256 == sent for sent, _ in self._sent.values()):
                    path = str(self._run / name)
                    self._client.upload_file(path, self._bucket, self._object(sha256), Callback=self._progress, Config=self._transfer)
            # The journal after the index, which must not name what the journal has not.
            for name, content in ((f"checkpoints/{checkpoints.INDEX}", checksummed_json(index)), (JOURNAL, self._whole_lines())):
                files[name] = [hashlib.sha256(content).hexdigest(), len(content)]
                if files[name] != self._sent.get(name):
                    self._client.put_object(Bucket=self._bucket, Key=self._object(files[name][0]), Body=content)
                    self._progress(len(content))
            if files != self._sent:
                self._replace_list(files)
            self._index = index

    def _files(self, index: dict[str, Any]) -> dict[str, list[Any]]:
        """Return SHA-256 and length of every file that belongs to the copy now, by its name."""
        found = {f"checkpoints/{one['file']}": one["sha256"] for one in checkpoints.listed(index)}
        rest = [*NAMES, *(f"plots/{path.name}" for path in (self._run / "plots").glob("*.*"))]
        found |= {name: checkpoints.sha256_of_file(self._run / name) for name in rest if (self._run / name).is_file()}
        return {name: [sha256, (self._run / name).stat().st_size] for name, sha256 in found.items()}

    def _replace_list(self, files: dict[str, list[Any]]) -> None:
        step = max((checkpoints.step_of(Path(name)) for name in files if name.startswith("checkpoints/step-")), default=0)
        content = json.dumps({"run": self._run_id(), "step": step, "files": files}).encode()
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + LIST, Body=content)
        assert self._sent is not None
        kept, before = {sha256 for sha256, _ in files.values()}, {sha256 for sha256, _ in self._sent.values()}
        self._sent = files
        for sha256 in before - kept:
            self._client.delete_object(Bucket=self._bucket, Key=self._object(sha256))

    def _known(self) -> dict[str, list[Any]]:
        """Return what an earlier start has sent; what it sent in vain is removed."""
        known = self.list()
        if known and known["run"] != self._run_id():
            whose = f"{self._prefix} is the copy of another start of this experiment, at step {known['step']}"
            raise MachineError(f"{os.environ[VARIABLE]}: {whose}; remove it there, or set another prefix")
        files: dict[str, list[Any]] = known["files"] if known else {}
        # What a sending that was cut off has left.
        kept = {self._object(sha256) for sha256, _ in files.values()} | {self._prefix + LIST}
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        for name in [one["Key"] for page in pages for one in page.get("Contents", ()) if one["Key"] not in kept]:
            self._client.delete_object(Bucket=self._bucket, Key=name)
        return files

    def list(self) -> dict[str, Any] | None:
        """Return the list of what the copy has, or None without a copy; raises MachineError if it is none of ours."""
        try:
            content: bytes = self._client.get_object(Bucket=self._bucket, Key=self._prefix + LIST)["Body"].read()
        except self._client.exceptions.NoSuchKey:
            return None
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            found = json.loads(content)
            facts = [(str(name), str(sha256), int(size)) for name, (sha256, size) in found["files"].items()]
            names = {name.removeprefix("checkpoints/").removeprefix("plots/") for name, _, _ in facts}
            if JOURNAL in names and not names & {"", ".", ".."} and all("/" not in name for name in names):
                return {"run": str(found["run"]), "step": int(found["step"]), "files": found["files"]}
        raise self._damaged(LIST)

    def _damaged(self, name: str) -> MachineError:
        return MachineError(f"{os.environ[VARIABLE]}: {self._prefix}{name} is damaged: it is not what was sent; unset {VARIABLE}")

    def _run_id(self) -> str:
        return last(self._run / JOURNAL, "run").get("id", "")

    def _whole_lines(self) -> bytes:
        return (self._run / JOURNAL).read_bytes().rpartition(b"\n")[0] + b"\n"

    def _object(self, sha256: str) -> str:
        return f"{self._prefix}files/{sha256}"

    def fetch(self) -> int | None:
        """Fetch the copy; returns its step, or None if there is none. A kill in between leaves a run that has not begun."""
        with one_line(f"cannot be asked for {self._run.name}; unset {VARIABLE} to begin without it"):
            found = self.list()
            if found is None:
                return None
            make_folder(self._run)
            files: dict[str, list[Any]] = found["files"]
            with atomic_folder(self._run / "checkpoints") as scratch:
                for name in files:
                    if name.startswith("checkpoints/"):
                        self._download(name, files[name][0], scratch / Path(name).name)
            for name in files:
                if not name.startswith("checkpoints/") and name != JOURNAL:
                    self._download(name, files[name][0], self._run / name)
            # Last: without a journal nothing else counts.
            self._download(JOURNAL, files[JOURNAL][0], self._run / JOURNAL)
        return int(found["step"])

    def _download(self, name: str, sha256: str, path: Path) -> None:
        make_folder(path.parent)
        # A checkpoint may be larger than the memory.
        partial = path.with_name(f".{path.name}.partial")
        self._client.download_file(self._bucket, self._object(sha256), str(partial), Config=self._transfer)
        if checkpoints.sha256_of_file(partial) != sha256:
            partial.unlink()
            raise self._damaged(name)
        fsync_path(partial)
        os.replace(partial, path)
        fsync_path(path.parent)


def fetch(run: Path) -> str | None:
    """Fetch a run that this machine does not have; returns a line for people, or None if there is nothing to fetch."""
    where = configured()
    if where is None or (run / JOURNAL).exists():
        return None
    step = Copy(run, *where).fetch()
    return None if step is None else f"fetched {run} from {os.environ[VARIABLE]}, at step {step}"


def write_state(run: Path, error: str | None) -> None:
    """Write down what went wrong last, for whoever waits for the copy."""
    with contextlib.suppress(OSError):
        atomic_write(run / "copy.json", json.dumps({"error": error}).encode())


def read_error(run: Path) -> str | None:
    """Return what went wrong last, or None."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((run / "copy.json").read_bytes()).get("error")
    return None
