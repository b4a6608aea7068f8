"""A rank that failed: which one, where, why, and whether it is the cause or only heard of it."""

import contextlib
import json
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import heartbeat
from pipeline.heartbeat import Snapshot

# What a rank says when it is a peer that was lost.
CONSEQUENCE = re.compile(
    r"onnection (closed|reset|refused|was likely closed)|connectFullMesh|Broken pipe|Timed out waiting|unhandled system error"
    r"|remote process exited|communicator was aborted|collective operation timeout"
)
OUT_OF_MEMORY = re.compile(r"out of memory|[Cc]an(no|')t allocate memory|not enough memory|MemoryError|bad_alloc")
OUR_OWN = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
# A rank that hung; the same code as for one that was lost.
HUNG = 6


@dataclass(frozen=True)
class Failure:
    """The first rank that failed in an attempt, on one machine."""

    rank: int | None
    exit_code: int
    cause: str
    attempt: int
    # The step that it was in; -1 before the first one.
    step: int = -1
    # Whether the kernel ended it for want of memory.
    oom_killed: bool = False
    # Whether it waits for another machine's rank.
    waiting: bool = False
    host: str | None = None
    at: float = field(default_factory=time.monotonic)

    @property
    def signal(self) -> str | None:
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else None

    @property
    def is_consequence(self) -> bool:
        """Whether it only tells of another's."""
        return self.waiting or (self.signal is None and bool(CONSEQUENCE.search(self.cause)))

    @property
    def out_of_memory(self) -> bool:
        return self.oom_killed or bool(OUT_OF_MEMORY.search(self.cause))

    @property
    def deterministic(self) -> bool:
        """Whether it comes from within, so that the same step would fail again."""
        return not self.is_consequence and (self.out_of_memory or self.exit_code > 0 or self.signal in OUR_OWN)


@dataclass
class LaunchResult:
    """What happened while torchrun ran."""

    stopped_by: int | None = None
    stopped_at_once: bool = False
    exit_code: int = 0
    nobody_came_back: bool = False
    given_up: str | None = None
    torchrun_was_stopped: bool = False
    # Torchrun has ended, and nobody said why.
    unexplained: bool = False
    failures: list[Failure] = field(default_factory=list[Failure])

    def root_cause(self) -> Failure:
        """Of the failures that came with the last one, the one that is not a peer's complaint."""
        last = self.failures[-1]
        together = [one for one in self.failures if one.attempt == last.attempt or (one.host != last.host and one.at > last.at - 15)]
        return next((one for one in together if not one.is_consequence), last)


def folder_of(logs: Path, attempt: int, local_rank: int) -> Path | None:
    """Where torchrun keeps what a rank of an attempt says."""
    return next(iter(logs.glob(f"*/attempt_{attempt}/{local_rank}")), None)


def snapshot_of(folder: Path | None) -> Snapshot | None:
    """Where a rank was last."""
    return heartbeat.read(folder) if folder else None


def newest_attempt(logs: Path) -> int:
    """How often all ranks have been started again."""
    return max((int(path.name.partition("_")[2]) for path in logs.glob("*/attempt_*")), default=0)


def exit_reasons(logs: Path, ranks: int) -> list[Failure]:
    """What ranks of the newest attempt have left as their last words."""
    attempt = newest_attempt(logs)
    signs = [sign for local in range(ranks) if (sign := snapshot_of(folder_of(logs, attempt, local)))]
    return [Failure(sign.rank, sign.exit_code, sign.words, attempt, sign.step) for sign in signs if sign.exit_code]


def first_lost(logs: Path, attempt: int, closed: set[int]) -> tuple[int, int] | None:
    """Local rank and exit code (0: not known) of the one that went by itself, where torchrun ended those with the given numbers."""
    for folder in sorted(logs.glob(f"*/attempt_{attempt}/*")):
        sign = snapshot_of(folder) if folder.name.isdigit() else None
        if sign and sign.pid not in closed:
            return int(folder.name), sign.exit_code or int((folder / "error.json").exists())
    return None


def cause_of(folder: Path | None) -> str:
    """What a rank said last: its own error, or the last line it wrote."""
    if folder is None:
        return ""
    sign = heartbeat.read(folder)
    if sign and sign.words:
        return sign.words
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        message: Any = json.loads((folder / "error.json").read_text())["message"]
        return str(message if isinstance(message, str) else message["message"]).strip()
    with contextlib.suppress(OSError):
        lines = [line for line in (folder / "stderr.log").read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""
    return ""
