"""The job file: the configuration as the launcher has resolved it, for every rank."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pipeline.config import Config


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


def read(path: Path) -> Job:
    """Read a job file."""
    return Job.model_validate_json(path.read_text())
