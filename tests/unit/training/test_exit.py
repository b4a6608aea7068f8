"""How a rank ends after an error: at once, whatever still runs in it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.experiment import ROOT

PROGRAM = """
import sys, threading, time
import torch.distributed as dist
from pipeline.training.train_rank import exit_at_once

sys.excepthook = exit_at_once
# As an NCCL kernel would be waited for that waits for a lost peer.
threading.Thread(target=time.sleep, args=(600,)).start()
print("said before", end="")
{before}
raise {error}
"""


# It puts a hook of its own before this one, and reads what that prints.
JOINED = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'


def ended(error: str, before: str) -> "subprocess.CompletedProcess[str]":
    program = PROGRAM.format(error=error, before=before)
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("before", ["", JOINED], ids=["alone", "in a process group"])
def test_an_error_ends_a_rank_at_once_and_nothing_that_was_printed_is_lost(before: str) -> None:
    done = ended("RuntimeError('the peer is lost')", before)
    assert (done.returncode, done.stdout) == (1, "said before")
    assert "Traceback (most recent call last):" in done.stderr
    assert done.stderr.splitlines()[-1] == "RuntimeError: the peer is lost"


def test_a_disk_that_is_full_keeps_no_rank() -> None:
    with Path("/dev/full").open("w") as full:
        program = PROGRAM.format(error="RuntimeError('the peer is lost')", before="")
        assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=full, stderr=full, timeout=60).returncode == 1
