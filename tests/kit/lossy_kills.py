"""A kill -9, as far as one process can play it, and a file that is damaged."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"}


class Killed(BaseException):
    """What a killed process raises: nothing of the product catches it."""


class Killer:
    """Raises before the n-th time that something in a folder is opened, renamed, removed or synced."""

    _left, _folder, _hooked = 0, "", False

    @classmethod
    @contextmanager
    def before(cls, count: int, folder: Path) -> Iterator[None]:
        if not cls._hooked:
            # It stays for as long as the process lives.
            sys.addaudithook(lambda event, arguments: cls._tick(event in EVENTS and cls._folder in str(arguments)))
            cls._hooked = True
        fsync = os.fsync

        def counted(file: int) -> None:
            cls._tick(True)
            fsync(file)

        os.fsync, cls._left, cls._folder = counted, count, str(folder)
        try:
            yield
        finally:
            os.fsync, cls._left = fsync, 0

    @classmethod
    def _tick(cls, counts: bool) -> None:
        if cls._left and counts:
            cls._left -= 1
            if not cls._left:
                raise Killed


def damage(path: Path, kind: str, share: float) -> None:
    """Cut a file at a share of its length, flip a bit there, or delete it."""
    content = bytearray(path.read_bytes())
    if kind == "delete" or not content:
        path.unlink()
    elif kind == "cut":
        path.write_bytes(content[: int(share * len(content))])
    else:
        bit = int(share * len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
