"""What the machines of a job say to each other through the store."""

from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict

from pipeline.config import Config

# The leader's name among machines that come and go; a worker's has a slash.
LEADER = "leader"
# Where a job's workers stand that take part, behind its id.
MEMBERS = "members"


class JobOffer(BaseModel):
    """A leader's offer of a job to workers: all that defines it except where their files are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    stage: Literal["train", "evaluate"]
    run: str
    config: Config
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    precision: Literal["fp32", "bf16"]
    bitwise_requirements: dict[str, str]
    # The UUIDs of the leader's GPUs.
    gpus: list[str] = []
    # The step at which the job stops, where that is before its end.
    until: int | None = None
    # Whether its ranks go on when others are lost.
    elastic: bool = False


class Reply(BaseModel):
    """A worker's reply to a job offer: the leader address it used, and the reason if it declines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: str
    host: str
    leader: str
    refusal: str | None
    # The UUIDs of its GPUs.
    gpus: list[str] = []


class Clock(Protocol):
    """The calls of the module `time` that waiting needs; a simulation passes its own."""

    def monotonic(self) -> float:
        """Return seconds for durations."""
        ...

    def time(self) -> float:
        """Return the wall clock."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait."""
        ...
