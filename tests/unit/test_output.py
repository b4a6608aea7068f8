"""Output that nobody takes: closed, full and slow pipes, and every command's ending with them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.console import hours
from pipeline.output import PIECE_BYTES, QUEUED_WRITES, BestEffortStream
from tests.kit.compose import free_port
from tests.kit.experiment import ROOT, Experiment, clean_environment
from tests.kit.waiting import until


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        for one in (reader, writer):
            with contextlib.suppress(OSError):
                os.close(one)


def fill(writer: int) -> int:
    """Leave no room in a pipe; returns how much it holds."""
    os.set_blocking(writer, False)
    held = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            held += os.write(writer, b"." * PIECE_BYTES)
    os.set_blocking(writer, True)
    return held


def test_what_is_written_is_read_whole_and_in_order() -> None:
    with pipe() as (reader, writer):
        stream = BestEffortStream(writer, lossy=True)
        for number in range(200):
            print(f"line {number}: \u2026", file=stream)
        stream.drain()
        os.close(writer)
        with os.fdopen(os.dup(reader), "rb") as file:
            content = file.read().decode()
        assert content == "".join(f"line {number}: \u2026\n" for number in range(200))


def catches(process: "subprocess.Popen[bytes]", number: int) -> bool:
    """Whether a process has a handler for a signal."""
    line = next(one for one in Path(f"/proc/{process.pid}/status").read_text().splitlines() if one.startswith("SigCgt:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize(("stream", "command", "code"), [("stderr", "prepare", 2), ("stdout", "doctor", 4)])
def test_a_stop_request_while_the_last_lines_wait_for_a_reader_changes_no_exit_code(
    experiment: Experiment, number: int, stream: str, command: str, code: int
) -> None:
    # Wrong, whatever else a busy machine has to say.
    wrong = {"prepare": ["missing.yaml"], "doctor": [experiment.params.name, "--leader", "127.0.0.1:1"]}[command]
    words = [sys.executable, "-m", "pipeline", command, "--params", f"{experiment.folder}/{wrong[0]}", *wrong[1:]]
    with pipe() as (_, writer):
        fill(writer)
        process = subprocess.Popen(words, cwd=ROOT, env=clean_environment(), **{stream: writer})
        until(lambda: catches(process, signal.SIGTERM), process)
        process.send_signal(number)
        # Results wait for a pager for as long as it takes, but not for one that takes nothing then.
        assert process.wait(timeout=30) == code


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_storm_of_stop_requests_at_the_end_loses_no_line(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pipeline", "prepare", "--params", str(tmp_path / "missing.yaml")]
    with pipe() as (reader, writer):
        fill(writer)
        process = subprocess.Popen(words, cwd=ROOT, env=clean_environment(), stderr=writer)
        os.close(writer)
        until(lambda: catches(process, signal.SIGTERM), process)
        for _ in range(20):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.005)
        with os.fdopen(os.dup(reader), "rb") as file:
            assert b"missing.yaml: no such file" in file.read()
        assert process.wait(timeout=30) == 2


def test_a_reader_that_has_gone_raises_nothing() -> None:
    with pipe() as (reader, writer):
        os.close(reader)
        stream = BestEffortStream(writer, lossy=True)
        for _ in range(10):
            print("a line", file=stream)
        stream.drain()


def test_a_reader_that_takes_nothing_holds_nobody_up_and_what_it_takes_later_comes() -> None:
    with pipe() as (reader, writer):
        held = fill(writer)
        stream = BestEffortStream(writer, lossy=True)
        started_at = time.monotonic()
        for _ in range(2 * QUEUED_WRITES):
            print("a line", file=stream)
        assert time.monotonic() < started_at + 0.5
        stream.drain()
        assert 0.9 < time.monotonic() - started_at < 3
        while held:
            held -= len(os.read(reader, min(held, PIECE_BYTES)))
        # A line and its end may come in two pieces.
        assert os.read(reader, 6) + os.read(reader, 1) == b"a line\n"
        # The rest is lost before another test's pipe has the same number.
        os.close(reader)
        stream.drain()


def test_a_slow_reader_of_results_gets_all_of_them() -> None:
    with pipe() as (reader, writer):
        fill(writer)
        stream = BestEffortStream(writer, lossy=False)
        stream.write("the result")
        # Not until the end of the file: other processes of this session may hold the pipe open.
        read = "while not text.endswith(b'the result'): text += os.read(0, 65536)"
        words = [sys.executable, "-c", f"import os, time; time.sleep(2.5); text = b''\n{read}\nprint('all of it')"]
        slow = subprocess.Popen(words, stdin=reader, stdout=subprocess.PIPE)
        stream.drain()
        assert slow.communicate(timeout=30)[0] == b"all of it\n"


def test_a_descriptor_that_another_process_made_non_blocking_loses_nothing() -> None:
    with pipe() as (reader, writer):
        held = fill(writer)
        os.set_blocking(writer, False)
        stream = BestEffortStream(writer, lossy=True)
        stream.write("a line\n")
        time.sleep(0.2)
        while held:
            held -= len(os.read(reader, min(held, PIECE_BYTES)))
        stream.drain()
        assert os.read(reader, 100) == b"a line\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [(["prepare"], 0), (["evaluate"], 2), (["train"], 3), (["sync"], 0), (["lead"], 2), (["lead", "false"], 1), (["nonsense"], 2)],
    ids=str,
)
@pytest.mark.parametrize("how", ["gone", "full", "closed"])
def test_a_command_ends_as_it_would_whoever_reads_it(words: list[str], code: int, how: str, experiment: Experiment) -> None:
    experiment.set(data__name="synthetic:200")
    if words == ["lead", "false"]:
        words = ["lead", "--port", str(free_port()), "--params", str(experiment.params), "false"]
    elif words != ["nonsense"]:
        words = [*words, "--params", str(experiment.params)]
    with pipe() as (reader, writer):
        if how == "full":
            fill(writer)
        else:
            os.close(reader)
        # As `2>&-` in a shell: there is no such descriptor.
        close = "exec 1>&- 2>&-; " if how == "closed" else ""
        command = ["sh", "-c", f'{close}exec "$@"', "sh", sys.executable, "-m", "pipeline", *words]
        done = subprocess.run(command, cwd=ROOT, env=clean_environment(), stdout=writer, stderr=writer, timeout=60)
    assert done.returncode == code


def test_help_for_a_reader_that_has_gone_is_no_error(tmp_path: Path) -> None:
    with pipe() as (reader, writer):
        os.close(reader)
        done = subprocess.run([sys.executable, "-m", "pipeline", "--help"], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_duration_has_as_many_hours_as_it_has() -> None:
    assert [hours(seconds) for seconds in (0, 59.6, 3600, 30 * 3600 + 61)] == ["00:00:00", "00:01:00", "01:00:00", "30:01:01"]
