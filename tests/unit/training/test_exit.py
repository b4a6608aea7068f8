"""How a rank ends after an error: at once, whatever still runs in it."""

import subprocess
import sys

from tests.kit.experiment import ROOT

PROGRAM = """
import sys, threading, time
from pipeline.training.train_rank import exit_at_once

sys.excepthook = exit_at_once
# As an NCCL kernel would be waited for that waits for a lost peer.
threading.Thread(target=time.sleep, args=(600,)).start()
print("said before", end="")
raise {error}
"""


def ended(error: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", PROGRAM.format(error=error)], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_an_error_ends_a_rank_at_once_and_nothing_that_was_printed_is_lost() -> None:
    done = ended("RuntimeError('the peer is lost')")
    assert (done.returncode, done.stdout) == (1, "said before")
    assert done.stderr.splitlines()[-1] == "RuntimeError: the peer is lost"
