"""The forming of a group, one of which is no longer there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline.cluster.store import serve
from pipeline.hardware.network import listen
from tests.kit.experiment import ROOT

# Of two ranks, the one with the smaller port waits to be connected to: here each of them in about half of all groups.
GROUPS = 12
PROGRAM = """
import os
import sys
import time
from pathlib import Path

from pipeline.config import Config
from pipeline.elastic.generations import Generation
from pipeline.elastic.process_groups import LostPeer, ProcessGroups
from pipeline.heartbeat import Heartbeat
from pipeline.job import Job

name, store, folder, groups = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
job = Job(config=Config(), device="cpu", backend="gloo", precision="fp32", prepared=folder, run=folder)


def enter(number):
    ProcessGroups(job, name, store, Heartbeat(folder)).enter(Generation(number, ["leader:a.0", "leader:a.1"]))


if name == "leader:a.1":
    for number in range(groups):
        if os.fork() == 0:
            print("comes", flush=True)
            enter(number)
    time.sleep(600)
for number in range(groups):
    began = time.monotonic()
    try:
        enter(number)
    except LostPeer:
        print(time.monotonic() - began, flush=True)
    if time.monotonic() > began + 1:
        break
"""


def test_a_group_is_given_up_soon_whose_other_rank_is_gone_with_its_address_told(tmp_path: Path) -> None:
    listening = listen(0, "127.0.0.1")
    port = listening.getsockname()[1]
    _store = serve("127.0.0.1", port, listening)

    def start(name: str) -> subprocess.Popen[str]:
        (tmp_path / name).mkdir()
        words = [sys.executable, "-c", PROGRAM, name, f"127.0.0.1:{port}", str(tmp_path / name), str(GROUPS)]
        variables = os.environ | {"TORCHELASTIC_RUN_ID": "job"}
        return subprocess.Popen(words, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True)

    other = start("leader:a.1")
    assert other.stdout is not None
    assert [other.stdout.readline() for _ in range(GROUPS)] == ["comes\n"] * GROUPS
    # Each tells its address, and waits for that of a rank that has not come.
    time.sleep(0.5)
    os.killpg(other.pid, signal.SIGKILL)
    other.communicate()
    said, _ = start("leader:a.0").communicate(timeout=60)
    seconds = [float(one) for one in said.splitlines()]
    assert seconds and max(seconds) < 4, seconds
