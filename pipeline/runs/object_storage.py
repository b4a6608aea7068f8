"""A run's place in object storage, LOCKSTEP_COPY=s3://BUCKET/PREFIX: objects, and one list that names the object of every file.

The list is replaced in one request, if nobody else has replaced it meanwhile. No process lists what another may remove: each puts its
objects into a folder of its own. So whenever sending ends, the list that is there names objects that are there.
"""

import contextlib
import io
import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from io import BufferedReader
from pathlib import Path
from typing import Any

from pipeline.config import ConfigError, MachineError

VARIABLE, LIST = "LOCKSTEP_COPY", "list.json"
CONNECT_SECONDS, READ_SECONDS = 5, 20
# What no list names is removed if it is so old: a younger object may be of a process that has yet to list it.
UNLISTED_HOURS = 1.0
OBJECT = re.compile(r"files/[0-9a-f]+/[0-9a-f]{64}")


class Refused(MachineError):
    """The copy is not what it should be, or not this process's to replace: asking again does not help."""


class Missing(Exception):
    """An object that the list names is not there."""


class Replaced(Exception):
    """The list is not the one that was read."""


@dataclass(frozen=True)
class Listed:
    """What the list says: of which run, at which step, and every file's object; with the version of the list."""

    run: str
    step: int
    files: dict[str, str]
    version: str


def configured() -> tuple[str, str] | None:
    """Return bucket and prefix, or None; raises ConfigError if it is not the address of a bucket."""
    said = os.environ.get(VARIABLE, "")
    found = re.fullmatch(r"s3://([A-Za-z0-9.\-_]{3,255})(?:/(.*?))?/*", said)
    if "@" in said:
        raise ConfigError(f"{VARIABLE}: write s3://BUCKET/PREFIX; keys belong in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
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


class Place:
    """A run's place in a bucket."""

    def __init__(self, bucket: str, prefix: str, run: str, progress: Callable[[int], None] = lambda _: None):
        # Only here: who has no copy does not wait for this import.
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config
        from botocore.exceptions import ClientError

        for name in ("boto3", "botocore"):
            # They tell where they found credentials.
            logging.getLogger(name).setLevel(logging.WARNING)
        self._bucket, self._progress, self._error = bucket, progress, ClientError
        self._prefix = f"{prefix}/{run}/" if prefix else f"{run}/"
        self.address = f"s3://{bucket}/{self._prefix}"
        # We check what we fetch ourselves, and other stores than Amazon's know no checksums behind a body.
        sums: Any = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        limits = Config(connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, retries={"total_max_attempts": 2}, **sums)
        self._transfer = TransferConfig(max_concurrency=2)
        with one_line("cannot be used"):
            self._client: Any = boto3.client("s3", config=limits)
        # Any answer is progress, also one after which botocore asks again.
        self._client.meta.events.register("response-received.s3", lambda exception=None, **_: exception or progress(0))
        self.begin()

    def begin(self) -> None:
        """Put objects into a new folder from here on; nothing is in it."""
        self._folder, self._uploaded = f"files/{uuid.uuid4().hex}/", set[str]()

    def upload(self, sha256: str, content: BufferedReader | bytes) -> str:
        """Upload what has this digest, unless it was before; returns the object's name."""
        name = self._folder + sha256
        place = {"Bucket": self._bucket, "Key": self._prefix + name}
        if sha256 in self._uploaded:
            return name
        file = io.BytesIO(content) if isinstance(content, bytes) else content
        self._client.upload_fileobj(file, **place, Callback=self._progress, Config=self._transfer)
        self._uploaded.add(sha256)
        return name

    def remove(self, name: str) -> None:
        """Remove an object."""
        self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)
        self._uploaded.discard(name.rpartition("/")[2])

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file; Missing if it is not there."""
        try:
            self._client.download_file(self._bucket, self._prefix + name, str(path), Config=self._transfer)
        except self._error as error:
            if code_of(error) in ("404", "NoSuchKey"):
                raise Missing from None
            raise

    def replace_list(self, run: str, step: int, files: dict[str, str], before: Listed | None) -> Listed:
        """Put the list; Replaced if it is not the one from before any more."""
        content = json.dumps({"run": run, "step": step, "files": files}).encode()
        place: Any = {"Bucket": self._bucket, "Key": self._prefix + LIST, "Body": content}
        unchanged = {"IfMatch": before.version} if before else {"IfNoneMatch": "*"}
        try:
            done = self._client.put_object(**place, **unchanged)
        except self._error as error:
            if code_of(error) in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
                raise Replaced from None
            if code_of(error) not in ("NotImplemented", "501"):
                raise
            # Some stores have no conditional requests.
            if self.read_list() != before:
                raise Replaced from None
            done = self._client.put_object(**place)
        return Listed(run, step, files, done["ETag"])

    def remove_unlisted(self, listed: Listed) -> None:
        """Remove what a sending that was cut off has left, as far as this is allowed."""
        with contextlib.suppress(self._error):
            self._remove_unlisted(listed)

    def _remove_unlisted(self, listed: Listed) -> None:
        until = datetime.now(UTC) - timedelta(hours=UNLISTED_HOURS)
        kept, place = set(listed.files.values()), {"Bucket": self._bucket, "Prefix": f"{self._prefix}files/"}
        for page in self._client.get_paginator("list_objects_v2").paginate(**place):
            for one in page.get("Contents", ()):
                if one["LastModified"] < until and one["Key"].removeprefix(self._prefix) not in kept:
                    self._client.delete_object(Bucket=self._bucket, Key=one["Key"])
        for one in self._client.list_multipart_uploads(**place).get("Uploads", ()):
            if one["Initiated"] < until:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=one["Key"], UploadId=one["UploadId"])

    def read_list(self) -> Listed | None:
        """Return what the list says, or None without a copy; Refused if it is none of ours."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + LIST)
        except self._client.exceptions.NoSuchKey:
            return None
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            found = json.loads(answer["Body"].read())
            files = {str(name): str(place) for name, place in found["files"].items()}
            names = {name.removeprefix("checkpoints/").removeprefix("plots/") for name in files}
            inside = "journal.jsonl" in names and not names & {"", ".", ".."} and all("/" not in name for name in names)
            if inside and all(OBJECT.fullmatch(place) for place in files.values()):
                return Listed(str(found["run"]), int(found["step"]), files, str(answer.get("ETag", "")))
        raise self.damaged(LIST)

    def damaged(self, name: str) -> Refused:
        """The error for what is not what was sent."""
        return Refused(f"{self.address}{name} is missing or not what was sent; remove the copy, or unset {VARIABLE}")


def code_of(error: Any) -> str:
    """Return the code that object storage answered with."""
    return str(error.response.get("Error", {}).get("Code", ""))
