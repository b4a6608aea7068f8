"""What people watch: one live line in a terminal, plain lines in a log."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.tracking.journal import RANKS, Tail

PLAIN_EVERY_SECONDS = 30


class Progress:
    """Follows a journal and shows where the training is, and how long it takes to where it is to stop."""

    def __init__(self, journal: Path, total_steps: int, steps_per_epoch: int, until: int | None = None):
        self._journal, self._tail = journal, Tail(journal)
        self._total, self._per_epoch, self._until = total_steps, steps_per_epoch, until or total_steps
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True) if self._console.is_terminal else None
        self._printed_at = time.monotonic()
        self._images_per_second, self._num_groups = 0.0, 0

    def __enter__(self) -> "Progress":
        # What was there before has been shown before.
        self._tail = Tail(self._journal, self._journal.stat().st_size)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False)

    def tick(self) -> None:
        """Show what is new in the journal."""
        for line in self._tail:
            if line["kind"] == "metrics":
                self._show(line["step"], line["values"])
            elif line["kind"] == "note":
                self.say(line["text"])
            elif line["kind"] == RANKS:
                self._show_ranks(line)

    def _show_ranks(self, line: dict[str, Any]) -> None:
        """Who goes on, of an elastic training; a first group has nobody to lose."""
        again = "no rank has the weights any more; " if self._num_groups and line.get("anew") else ""
        self._num_groups += 1
        self.say(f"{again}{line['ranks']} rank{'s' if line['ranks'] > 1 else ''} from step {line['step']} on")

    def _show(self, step: int, values: dict[str, Any]) -> None:
        epoch, epochs = (step - 1) // self._per_epoch + 1, self._total // self._per_epoch
        if "validation/accuracy" in values:
            self.say(
                f"epoch {epoch}/{epochs}  validation loss {values['validation/loss']:.4f}  accuracy {values['validation/accuracy']:.4f}"
            )
            self._printed_at = time.monotonic()
        elif "train/loss" in values:
            self._images_per_second = values.get("train/images_per_second", self._images_per_second)
            images_left = (self._until / step - 1) * values["train/samples"]
            left = hours(images_left / self._images_per_second) if self._images_per_second else "?"
            text = (
                f"epoch {epoch}/{epochs}  step {step}/{self._total}  loss {values['train/loss']:.4f}  "
                f"accuracy {values['train/accuracy']:.3f}  {self._images_per_second:,.0f}/s  {left} left"
            )
            if self._live:
                self._live.update(Text(text, no_wrap=True, overflow="ellipsis"))
            elif time.monotonic() - self._printed_at > PLAIN_EVERY_SECONDS:
                self.say(text)
                self._printed_at = time.monotonic()


def hours(seconds: float) -> str:
    """Return a duration as HH:MM:SS, with as many hours as it has."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
