"""Where the files of an experiment are, and how one is written so that nobody sees half of it."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

NETWORK = (
    *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.ENETDOWN),
    *(errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EADDRINUSE, errno.EADDRNOTAVAIL),
)
FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "see that there is room and a right to write"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "see that there is room and a right to write"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP), "move what is there away"),
    **dict.fromkeys(NETWORK, "see that the network reaches it"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files: ulimit -n"),
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), "see that there is memory, and room for another process: ulimit -u"),
    errno.EIO: "see whether its disk is sound",
}


def describe(error: OSError, where: str) -> str:
    """Return an error of the system's in one line: the file, or else `where`, what is wrong, and what to do."""
    text = f"{error.filename or where}: {error.strerror or error}"
    # A name that does not resolve has numbers of its own.
    fix = FIXES[errno.ENETUNREACH] if isinstance(error, (socket.gaierror, TimeoutError)) else FIXES.get(error.errno or 0)
    return f"{text}; {fix}" if fix else text


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise OSError if the folder's disk has less room."""
    total_bytes, _, free_bytes = shutil.disk_usage(folder)
    # Some file systems report no sizes.
    if total_bytes and free_bytes < needed_bytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed_bytes:,} bytes are needed, {free_bytes:,} are free", str(folder))


def fsync_path(path: Path) -> None:
    """Wait until a file's content or a folder's names are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def make_folder(path: Path) -> None:
    """Create a folder and its parents; they survive a power cut from here on."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync_path(folder.parent)


class Content(Protocol):
    """What a file is to hold, where it is more than is held at once."""

    size_bytes: int

    def write_to(self, file: FileIO) -> None: ...


def atomic_write(path: Path, content: bytes | Content) -> None:
    """A reader sees the old file or the new one, also after a power cut; where it does not fit, nothing is left of the new one."""
    size_bytes = len(content) if isinstance(content, bytes) else content.size_bytes
    make_folder(path.parent)
    check_room(path.parent, size_bytes)
    scratch = path.with_name(f".{path.name}.partial")
    with _open_alone(scratch) as file:
        try:
            if isinstance(content, bytes):
                write_all(file, content)
            else:
                content.write_to(file)
            os.fsync(file.fileno())
        except OSError:
            scratch.unlink(missing_ok=True)
            check_room(path.parent, size_bytes)
            raise
        os.replace(scratch, path)
    fsync_path(path.parent)


def write_all(file: FileIO, content: bytes) -> None:
    """Write all of it: the system may take a part at a time."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _open_alone(scratch: Path) -> FileIO:
    """Open a scratch file, empty, for this process alone: another one may be writing the same file, or have been killed at it."""
    while True:
        file = FileIO(scratch, "r+", opener=lambda path, flags: os.open(path, flags | os.O_CREAT, 0o666))
        fcntl.flock(file, fcntl.LOCK_EX)
        # Whoever held the lock has put the file in place, or removed it.
        if _is_same_file(file, scratch):
            file.truncate(0)
            return file
        file.close()


def _is_same_file(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def checksummed_json(values: dict[str, Any]) -> bytes:
    """JSON that carries its own digest."""
    return (json.dumps(values | {"digest": _checksum(values)}, indent=2) + "\n").encode()


def write_checksummed_json(path: Path, values: dict[str, Any]) -> None:
    """Write JSON that carries its own digest."""
    atomic_write(path, checksummed_json(values))


def read_checksummed_json(path: Path) -> dict[str, Any] | None:
    """Return what was written, or None if it is damaged or missing."""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        return values if values.pop("digest") == _checksum(values) else None
    except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@contextmanager
def atomic_folder(path: Path) -> Generator[Path]:
    """A folder to fill, which takes the place of `path` when all of it is there and on the disk, and else leaves nothing."""
    make_folder(path.parent)
    for left in path.parent.glob(f".{path.name}-*"):
        if left.stat().st_mtime < time.time() - 3600:
            # Of a process that was killed.
            shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        yield scratch
        scratch.chmod(0o755)
        for inside in (*scratch.rglob("*"), scratch):
            fsync_path(inside)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(scratch, path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Wait for a kernel lock (flock) of a file or a folder and hold it; it is released when this process ends, however it ends."""
    file = os.open(path, os.O_RDONLY) if path.is_dir() else os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


@dataclass(frozen=True)
class Paths:
    """All paths of one experiment."""

    params: Path

    @property
    def root(self) -> Path:
        return self.params.resolve().parent

    @property
    def home(self) -> Path:
        """Where things lie that outlive a temporary experiment: the workspace from which DVC started it."""
        parts = self.root.parts
        for at in range(len(parts) - 2):
            if parts[at : at + 3] == (".dvc", "tmp", "exps"):
                return Path(*parts[:at])
        return self.root

    @property
    def downloads(self) -> Path:
        return self.home / "data" / "raw"

    @property
    def prepared(self) -> Path:
        return self.root / "data" / "prepared"

    @property
    def runs(self) -> Path:
        return self.home / "runs"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics"

    @property
    def plots(self) -> Path:
        return self.root / "plots"
