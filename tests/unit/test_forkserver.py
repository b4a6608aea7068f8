"""The fork server by itself; what its processes find is in launch/test_agent.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.experiment import ROOT

# Runs in a process of its own: to fork this one would take all of pytest along.
BEGIN = """
import os, signal, sys, time
from pipeline import forkserver
WORDS = [*forkserver.RUN_MODULE, "doing"]
"""
STANDS_STILL = """
forkserver.FORK_SECONDS = 1
server = forkserver.ForkServer("doing")
os.kill(server.pid, signal.SIGSTOP)
for _ in range(2):
    assert server.start(WORDS, {}, 1, 2) is None
assert os.waitstatus_to_exitcode(os.waitpid(server.pid, 0)[1]) == -signal.SIGKILL
"""
TOO_LONG = """
server = forkserver.ForkServer("doing")
assert server.start([*WORDS, "x" * 1_000_000], {}, 1, 2) is None
"""
NOBODY_WAITS_FOR_CHILDREN = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
server = forkserver.ForkServer("doing")
assert server.start(WORDS, {}, 1, 2).wait(10) == 0
"""
ANOTHER_MODULE = """
server = forkserver.ForkServer("doing")
assert server.start([*forkserver.RUN_MODULE, "other"], {}, 1, 2) is None
assert server.start([sys.executable, "doing.py"], {}, 1, 2) is None
"""
SEVERAL = """
server = forkserver.ForkServer("doing")
forked = [server.start([*WORDS, str(code)], {}, 1, 2) for code in range(4)]
assert len({one.pid for one in forked}) == 4
assert [one.wait(10) for one in forked] == [0, 1, 2, 3]
"""
ENDED_BY_A_SIGNAL_AND_SLOW = """
import subprocess
server = forkserver.ForkServer("doing")
one = server.start([*WORDS, "sleep"], {}, 1, 2)
assert one.poll() is None
try:
    one.wait(0.2)
except subprocess.TimeoutExpired:
    os.kill(one.pid, signal.SIGTERM)
assert one.wait(10) == one.poll() == -signal.SIGTERM
"""
DOING = """
import sys, time
if sys.argv[1:] == ["sleep"]:
    time.sleep(60)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


@pytest.mark.parametrize("code", [STANDS_STILL, TOO_LONG, NOBODY_WAITS_FOR_CHILDREN, ANOTHER_MODULE, SEVERAL, ENDED_BY_A_SIGNAL_AND_SLOW])
def test_a_request_is_a_process_or_none(tmp_path: Path, code: str) -> None:
    (tmp_path / "doing.py").write_text("if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in DOING.strip().splitlines()))
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", BEGIN + code], cwd=tmp_path, env=environment, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
