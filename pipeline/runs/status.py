"""status.json: how a run ended, for programs and in one line for people."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.files import atomic_write

STOPPED, INTERRUPTED, TERMINATED = 75, 130, 143


class StopRequested(Exception):
    """A signal came while nothing ran that could be lost: exit 75. Raised anywhere, so it is no kind of error that is expected there."""

    exit_code = STOPPED


@dataclass(frozen=True)
class Outcome:
    """What status.json holds."""

    outcome: str
    exit_code: int | None
    cause: str
    rank: int | None
    step: int
    checkpoint: str | None
    command: str
    # Whose it was while it ran: a kill -9 of everything leaves this behind.
    process: str | None = None
    stage: str = "train"

    def write(self, run: Path) -> None:
        """For other programs: DVC and torchrun swallow exit codes."""
        content = (json.dumps(asdict(self), indent=2) + "\n").encode()
        try:
            atomic_write(run / "status.json", content)
        except OSError:
            # The disk is full, and this is what must be said: in the place of the old one there is room for it.
            with (run / "status.json").open("r+b") as file:
                file.write(content)
                file.truncate()


def running(run: Path, step: int, command: str, stage: str = "train") -> None:
    """Until there is an ending: from where, by whom, and how to go on; no checkpoint, as later ones take its place."""
    Outcome("running", None, "", None, step, None, command, f"{os.getpid()} on {socket.gethostname()}", stage).write(run)


def message(outcome: Outcome, has_saved: bool = True) -> str:
    """The one line for people: what, where, what to do; `has_saved`: whether the run has ever written a checkpoint."""
    if outcome.outcome in ("configuration", "data", "machine"):
        return outcome.cause
    kept = f" Kept: {outcome.checkpoint}." if outcome.checkpoint else ""
    what = " To go on" if has_saved or kept or outcome.stage != "train" else " No checkpoint was written yet. To start"
    return f"{outcome.cause}.{kept}" + (f"{what}: {outcome.command}" if outcome.command else "")
