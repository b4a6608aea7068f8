"""Image files as squares of uint8: each decoded by itself, many on all cores, into files that a killed process has not written in vain."""

import json
import logging
import os
import shutil
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_byte
from multiprocessing import get_context
from pathlib import Path
from uuid import uuid4

import numpy as np
import PIL
from numpy.typing import NDArray

from pipeline import pictures
from pipeline.config import DataError, MachineError, digest
from pipeline.data import Split, decode, picked
from pipeline.data.image_files import Files, shown, told
from pipeline.files import atomic_write, check_room, make_folder
from pipeline.hardware.cgroup import usable_cpus
from pipeline.process_tree import die_with, ignores_interrupts

log = logging.getLogger(__name__)

# Some files for a process at once.
CHUNK = 8
SCRATCH = ".decoding-"
# Of a decoder, the one thing that it is told while it works.
_stopped: list[c_byte] = []


class Decoded:
    """Images that are decoded on all cores into files, in their order; a decoder that was killed is gone on from where it was.

    What has been decoded is known by the files' names, inodes, sizes and times, and ends with the machine: after a power cut a file may
    be of the right size and empty.
    """

    def __init__(self, place: Path, root: Path, side: int, found: dict[str, Files], allowed: int = 0):
        self._bytes, self._side, self._found, self._allowed = 3 * side * side, side, found, allowed
        # Why, in a line each; never more than are allowed.
        self.left_out: list[str] = []
        stats = [(name, *_known(path, root)) for name, files in found.items() for path in files.paths]
        decoder = [PIL.__version__, *(Path(one).read_text() for one in (__file__, decode.__file__, pictures.__file__)), boot_id()]
        self._folder = place / f"{SCRATCH}{digest([shown(root.resolve()), stats, side, decoder])[:16]}"
        make_folder(place)
        for other in place.glob(f"{SCRATCH}*"):
            if other != self._folder:
                # Of other images, by a process that was killed: whoever prepares here does it alone.
                shutil.rmtree(other, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)
        there = sum((self._folder / name).stat().st_size for name in found if (self._folder / name).exists())
        check_room(self._folder, len(stats) * self._bytes - there)

    def discard(self) -> None:
        """Remove the files: what was decoded is packed."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def split(self, name: str) -> Split:
        """Decode one split; raises DataError with the first image that is broken, and how many are, if more are than are allowed."""
        files, path = self._found[name], self._folder / name
        broken_in = self._folder / f"{name}.broken"
        if not broken_in.exists():
            # Nobody says which of these images are none.
            path.unlink(missing_ok=True)
        with path.open("ab") as out:
            done = out.tell() // self._bytes
            out.truncate(done * self._bytes)
            broken = Broken(broken_in, done)
            progress = Counted(done, len(files.paths))
            try:
                for index, image in enumerate(_each(files.paths[done:], self._side), done):
                    if isinstance(image, str):
                        broken.add(index, image)
                    if len(self.left_out) + len(broken.found) <= self._allowed:
                        out.write(bytes(self._bytes) if isinstance(image, str) else image.data)
                    progress.one()
            except KeyboardInterrupt:
                log.info("%d of %d images are decoded, and need not be again", out.tell() // self._bytes, len(files.paths))
                raise
            except (MemoryError, BrokenProcessPool):
                raise MachineError(
                    "memory is too short: each core decodes an image at once; free some, or start on fewer cores (taskset)"
                ) from None
        self.left_out += broken.found.values()
        if len(self.left_out) > self._allowed:
            self.discard()
            cure = "remove or replace it, or set data.allow_broken"
            if len(self.left_out) > 1:
                cure = (
                    f"{len(self.left_out)} are broken, and data.allow_broken is {self._allowed}; remove or replace them, or set it higher"
                )
            raise DataError(f"{told(self.left_out)}; {cure}")
        shape = (len(files.paths), 3, self._side, self._side)
        # A file without a byte cannot be mapped.
        images = np.memmap(path, np.uint8, "r", shape=shape) if files.paths else np.empty(shape, np.uint8)
        whole = np.setdiff1d(np.arange(len(files.paths)), [*broken.found])
        return picked(Split(images, np.array(files.labels, np.int64)), whole, files.paths)


class Broken:
    """The images that could not be decoded, in a file that a killed process leaves."""

    def __init__(self, path: Path, done: int):
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        # A line that was cut off, or is of an image behind the last one, is of one that is decoded again.
        self.found: dict[int, str] = {index: said for index, said in map(json.loads, lines) if index < done}
        self._path = path
        atomic_write(path, "".join(map(_line, self.found.items())).encode())

    def add(self, index: int, said: str) -> None:
        """Note it before what stands for it is written among the images."""
        self.found[index] = said
        with self._path.open("a") as file:
            file.write(_line((index, said)))


def _line(one: tuple[int, str]) -> str:
    return json.dumps(one) + "\n"


class Counted:
    """Says how far it is, every ten seconds."""

    def __init__(self, done: int, total: int):
        self._done, self._total, self._said_at = done, total, time.monotonic()
        log.info("decoding %d images%s", total, f", {done:,} of them are there already" if done else "")

    def one(self) -> None:
        """One more is done."""
        self._done += 1
        if (now := time.monotonic()) > self._said_at + 10:
            self._said_at = now
            log.info("decoded %d of %d images", self._done, self._total)


def _known(path: Path, root: Path) -> tuple[str, int, int, int, int]:
    """By what a file is known again."""
    try:
        found = path.stat()
    except OSError:
        # Such as a link to nowhere, which decoding tells of.
        return shown(path.relative_to(root)), -1, -1, -1, -1
    return shown(path.relative_to(root)), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def boot_id() -> str:
    """Since when this machine runs; another one at each call where nobody says it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else uuid4().hex


def _each(paths: list[Path], side: int) -> Iterator[NDArray[np.uint8] | str]:
    if len(paths) <= CHUNK:
        yield from _all(paths, side)
        return
    # A decoder needs no threads of numpy's.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Not by fork: whoever calls this may have threads.
    count, under_way = usable_cpus(), deque[Future[list[NDArray[np.uint8] | str]]]()
    context = get_context("spawn")
    # Without a lock, which a decoder that is killed might hold.
    stopped = context.RawValue("b", 0)
    with ProcessPoolExecutor(count, context, _begin, (os.getpid(), stopped)) as pool:
        try:
            for start in range(0, len(paths), CHUNK):
                under_way.append(pool.submit(_unless_stopped, paths[start : start + CHUNK], side))
                # What is decoded and not written waits in memory.
                if len(under_way) > 4 * count:
                    yield from under_way.popleft().result()
            while under_way:
                yield from under_way.popleft().result()
        finally:
            # After Ctrl-C, or for want of room, the image that is under way is the last one.
            stopped.value = 1
            pool.shutdown(cancel_futures=True)


def _all(paths: list[Path], side: int) -> list[NDArray[np.uint8] | str]:
    with warnings.catch_warnings():
        # Such as EXIF that is not as it should be.
        warnings.simplefilter("ignore")
        return [decode.decode(path, side, shown(path)) for path in paths]


def _unless_stopped(paths: list[Path], side: int) -> list[NDArray[np.uint8] | str]:
    return [one for path in paths if not _stopped[0].value for one in _all([path], side)]


def _begin(parent: int, stopped: c_byte) -> None:
    """A terminal's Ctrl-C is the parent's to answer, whose end is also this process's."""
    ignores_interrupts()
    die_with(parent)
    _stopped.append(stopped)
