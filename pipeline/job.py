"""The job file: the configuration as the launcher has resolved it, for every rank."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pipeline.config import Config, DataError


class FirstWeights(BaseModel):
    """The file with the weights that a training begins with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Path
    sha256: str


def first_weights(config: Config, root: Path) -> FirstWeights | None:
    """Find the file of model.weights, if there is to be one."""
    if config.model.weights is None:
        return None
    file = root / config.model.weights
    try:
        with file.open("rb") as content:
            return FirstWeights(file=file, sha256=hashlib.file_digest(content, "sha256").hexdigest())
    except OSError as error:
        raise DataError(f"model.weights: {file}: {error.strerror}; name a file, from the folder of params.yaml on") from None


class Job(BaseModel):
    """The configuration with nothing left to decide."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Config
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    precision: Literal["fp32", "bf16"]
    prepared: Path
    run: Path
    # The model to evaluate; nothing while training.
    weights: Path | None = None
    # The step to stop at, if it is not the last one.
    until: int | None = None
    # Nothing where they are drawn.
    first_weights: FirstWeights | None = None

    @property
    def elastic(self) -> bool:
        """True if a lost rank leaves the others running."""
        return self.config.dist.elastic and self.why_not_elastic is None

    @property
    def why_not_elastic(self) -> str | None:
        """Why all ranks start again when one is lost; None if the others can go on."""
        dist = self.config.dist
        if not _can_watch_processes():
            return "it needs Linux, and to be allowed pidfd_open"
        if dist.strategy != "ddp":
            return f"strategy: {dist.strategy} has no way to go on without a rank"
        if dist.reduction != "ordered":
            return "reduction: native gives other bits on another number of ranks"
        if isinstance(dist.lanes_per_rank, list):
            return f"lanes_per_rank: {dist.lanes_per_rank} is for a number of ranks that stays"
        if dist.algorithm not in (None, "flat"):
            return f"algorithm: {dist.algorithm} has groups within the group"
        if (self.device, self.backend) != ("cpu", "gloo"):
            return f"it was not tried on {self.device} with {self.backend}"
        return None

    @property
    def journal(self) -> Path:
        return self.run / "journal.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def writing(self) -> Path:
        """The lock that rank 0, which writes journal and checkpoints, holds as long as it lives."""
        return self.run / "writing.lock"

    @property
    def result(self) -> Path:
        """The file with the result of evaluate's ranks."""
        return self.run / "evaluation.json"


def _can_watch_processes() -> bool:
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        # A sandbox that is older than this call.
        return False
    return True


def read(path: Path) -> Job:
    """Read a job file."""
    return Job.model_validate_json(path.read_text())
