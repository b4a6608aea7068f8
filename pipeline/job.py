"""A job: what the launcher has resolved and tells every rank, in one file."""

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

    @property
    def journal(self) -> Path:
        return self.run / "journal.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def writing(self) -> Path:
        """The lock that the rank which writes journal and checkpoints holds as long as it lives."""
        return self.run / "writing.lock"

    @property
    def result(self) -> Path:
        """What evaluate's ranks found."""
        return self.run / "evaluation.json"


def read(path: Path) -> Job:
    """A job file's job."""
    return Job.model_validate_json(path.read_text())
