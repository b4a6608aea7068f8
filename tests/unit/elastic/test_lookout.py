"""A rank in a group that has lost a member: what it waits for in vain, it is rid of; one that computes is left alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import heartbeat
from tests.kit.experiment import ROOT

PROGRAM = """
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from pipeline.elastic import lookout
from pipeline.heartbeat import Heartbeat

lookout.LOOK_SECONDS, lookout.HUNG_SECONDS, lookout.DEAF_SECONDS = 0.05, 0.3, 0.6
lookout.LITTLE_SECONDS = 0.005
kind, folder = sys.argv[1], Path(sys.argv[2])
own, shut, in_vain = Heartbeat(folder), [], threading.Event()
own.set_rank(2)
found = (7, kind == "silent")
member = SimpleNamespace(waits_in_vain=lambda: found)
ranks = SimpleNamespace(on_rank_zero=lambda mine, others: others)
groups = SimpleNamespace(ranks=ranks, number=8 if kind == "another" else 7, shut=shut.append)
with lookout.Lookout(member, groups, own, in_vain).looking():
    until = time.monotonic() + 2
    while time.monotonic() < until:
        if kind == "computes":
            sum(range(10_000))
        else:
            time.sleep(0.1)
        if kind == "silent":
            own.computing()
assert threading.active_count() == 1
print(len(shut) > 10, in_vain.is_set())
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [("hangs", None), ("computes", "False False"), ("another", "False False"), ("silent", "True False")],
)
def test_a_rank_that_hangs_in_a_group_that_is_no_more_ends(kind: str, said: str | None, tmp_path: Path) -> None:
    variables = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind, str(tmp_path)], cwd=ROOT, env=variables, capture_output=True, text=True)
    ended = heartbeat.read(tmp_path)
    assert ended is not None
    if said is None:
        assert (done.returncode, ended.exit_code, ended.rank) == (1, 1, 2), done.stderr
        assert ended.exit_reason == "Connection closed by a peer, and gloo waits on"
    else:
        assert (done.returncode, done.stdout.strip(), ended.exit_code) == (0, said, 0), done.stderr
