"""A rank that is asked to stop and waits for a peer that never answers."""

import subprocess
import sys

from tests.kit.experiment import ROOT

RANK = """
import os, signal, sys, time
import torch
from pipeline.ranks import Ranks
from pipeline.training.stopping import Stop
stop = Stop(Ranks(0, 1, torch.device("cpu"), None), 1)
os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[1] == "closed":
    stop.close()
time.sleep(2.5)
print("alive")
"""


def ended(how: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", RANK, how], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.strip()


def test_it_does_not_outlive_its_launcher_by_much_and_may_take_its_time_once_all_have_stopped() -> None:
    assert ended("waits") == (-14, "")
    assert ended("closed") == (0, "alive")
