"""Which of several failed ranks is the cause, and what it left to read."""

import signal
from pathlib import Path

import pytest

from pipeline.heartbeat import COMPUTING, FORM, SIZE_BYTES, write_exit_reason
from pipeline.launch.failures import Failure, LaunchResult, exit_reasons, failure_of
from pipeline.stop_signals import signal_name

NCCL = """[rank1]:[E1122 10:00:00.1 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread terminated with \
exception: NCCL error: remote process exited or there was a network error, NCCL version 2.30.7
terminate called after throwing an instance of 'c10::DistBackendError'
frame #7: clone + 0x44 (0x7f in /lib/libc.so.6)
"""


@pytest.mark.parametrize(("said", "is_consequence"), [(NCCL, True), ("terminate called\nframe #7: clone + 0x44\n", False)])
def test_a_rank_that_nccls_watchdog_aborted_has_lost_a_peer(said: str, is_consequence: bool, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stderr.log").write_text(said)
    found = failure_of(tmp_path, 0, 2, {1: -signal.SIGABRT}, lambda: False)
    assert (found.rank, found.signal, found.is_consequence, found.deterministic) == (1, "SIGABRT", is_consequence, not is_consequence)


@pytest.mark.parametrize(
    ("cause", "is_memory"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", False),
    ],
)
def test_memory_that_ran_out_is_known_by_what_cudas_libraries_say_too(cause: str, is_memory: bool) -> None:
    assert Failure(0, 1, cause, 0).out_of_memory == is_memory


def test_a_signal_without_a_name_is_a_number() -> None:
    assert [signal_name(number) for number in (9, 40)] == ["SIGKILL", "signal 40"]


def test_a_rank_that_wrote_to_stderr_names_the_file(tmp_path: Path) -> None:
    for local, said in enumerate(("Traceback", "")):
        (tmp_path / str(local)).mkdir()
        (tmp_path / str(local) / "stderr.log").write_text(said)
    assert failure_of(tmp_path, 0, 2, {0: 1}, lambda: False).log == str(tmp_path / "0" / "stderr.log")
    assert failure_of(tmp_path, 0, 2, {1: 1}, lambda: False).log == ""


def test_an_agent_that_was_oom_killed_is_memory_that_ran_out_unless_a_rank_says_why_it_ended(tmp_path: Path) -> None:
    for local in (0, 1):
        folder = tmp_path / "attempt_2" / str(local)
        folder.mkdir(parents=True)
        (folder / "heartbeat").write_bytes(FORM.pack(1, local, 7, COMPUTING, 1, 0).ljust(SIZE_BYTES, b"\0"))
    assert exit_reasons(folder.parent, 2, oom_killed=False) == []
    (killed,) = exit_reasons(folder.parent, 2, oom_killed=True)
    assert (killed.rank, killed.attempt, killed.step, killed.out_of_memory) == (None, 2, 7, True)
    write_exit_reason(folder, "diverged", 5)
    both = exit_reasons(folder.parent, 2, oom_killed=True)
    assert [(one.rank, one.step, one.cause, one.out_of_memory) for one in both] == [(1, 7, "diverged", False), (None, 7, "", True)]
    assert LaunchResult(failures=both).root_cause().cause == "diverged"


def test_an_agent_that_was_oom_killed_before_it_had_ranks_ran_out_of_memory_too() -> None:
    (killed,) = exit_reasons(None, 2, oom_killed=True)
    assert (killed.step, killed.out_of_memory) == (-1, True)
