"""Files that two processes write at once, and errors of the system in one line."""

import errno
import multiprocessing
import os
import socket
from pathlib import Path

import pytest

from pipeline.files import atomic_write, describe

WRITES = 60


def write_again_and_again(path: Path, content: bytes) -> None:
    for _ in range(WRITES):
        atomic_write(path, content)


def test_two_processes_that_write_one_file_at_once_leave_it_whole(tmp_path: Path) -> None:
    path, contents = tmp_path / "status.json", [b"a" * 3000, b"b" * 7]
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=write_again_and_again, args=(path, content)) for content in contents]
    for one in writers:
        one.start()
    while any(one.is_alive() for one in writers):
        assert not path.exists() or path.read_bytes() in contents
    for one in writers:
        one.join()
        assert one.exitcode == 0, "or one has moved the other's scratch file away"
    assert [one.name for one in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a"), "a: No space left on device; see that there is room and a right to write"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES), "a"), "a: Permission denied; see that there is room and a right to write"),
        (OSError(errno.EISDIR, os.strerror(errno.EISDIR), "a"), "a: Is a directory; move what is there away"),
        (OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)), "train: Connection refused; see that the network reaches it"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "train: Too many open files; raise the limit of open files: ulimit -n"),
        (OSError(errno.EIO, os.strerror(errno.EIO), "a"), "a: Input/output error; see whether its disk is sound"),
        (socket.gaierror(-2, "Name or service not known"), "train: Name or service not known; see that the network reaches it"),
        (TimeoutError("timed out"), "train: timed out; see that the network reaches it"),
        (OSError(errno.EDOM, os.strerror(errno.EDOM)), "train: Numerical argument out of domain"),
    ],
)
def test_an_error_of_the_system_is_said_with_what_helps_against_it(error: OSError, said: str) -> None:
    assert describe(error, "train") == said
