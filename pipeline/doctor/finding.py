"""One line of the doctor's report, and the thread that a check runs in."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeVar

from pipeline.config import MachineError

T = TypeVar("T")
Kind = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """What a check found and, if it is wrong, what to do about it."""

    kind: Kind
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<7}{self.text}" + (f": {self.fix}" if self.fix else "")


def in_background(check: Callable[[], T]) -> Future[T]:
    """Run a check in a daemon thread, so that one that never returns delays neither the others nor the exit."""
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(check())
        except (OSError, ValueError, MachineError) as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return result
