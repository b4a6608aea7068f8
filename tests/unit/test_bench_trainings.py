"""How the bench tells the time that ranks compute from that of all beside them."""

import subprocess
import sys
import time

import psutil

from bench.trainings import AGENT, RANK, computed_seconds

# A launcher, whose agent has a rank that computes.
LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], *sys.argv[1:]])
"""
STARTS_A_RANK = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "while True: pass", sys.argv[3]])
"""


def test_time_of_ranks_is_told_from_time_beside_them() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, STARTS_A_RANK, AGENT, RANK])
    try:
        until = time.monotonic() + 60
        ranks, beside = computed_seconds(launcher.pid)
        while sum(ranks.values()) < 0.3 and time.monotonic() < until:
            time.sleep(0.05)
            ranks, beside = computed_seconds(launcher.pid)
        # The agent's command names the ranks' program, too.
        assert (len(ranks), len(beside)) == (1, 2)
        assert launcher.pid in beside
        assert sum(ranks.values()) >= 0.3 > sum(beside.values())
    finally:
        for one in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
            one.kill()
        launcher.wait()
    assert computed_seconds(launcher.pid) == ({}, {})
