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
SPAWNED = """
import subprocess
if __name__ == "__main__":
    assert os.environ.pop("PATH")
    server = forkserver.SpawnServer()
    assert server.start([sys.executable, "doing.py"], {}, 1, 2) is None
    environment = dict(os.environ, LOCAL_RANK="3")
    with open("said", "w") as said:
        several = [server.start([*WORDS, word], environment, said.fileno(), said.fileno()) for word in ("0", "7", "no number", "sleep")]
    assert [one.wait(20) for one in several[:3]] == [0, 7, 1]
    assert several[3].poll() is several[3].returncode is None
    try:
        several[3].wait(1)
    except subprocess.TimeoutExpired:
        shown = open(f"/proc/{several[3].pid}/cmdline").read().strip(chr(0)).split(chr(0))
        assert shown[-1] == "(local rank 3)", shown
        assert os.getsid(several[3].pid) == several[3].pid
        os.kill(several[3].pid, signal.SIGTERM)
    assert several[3].wait(10) == several[3].poll() == -signal.SIGTERM
    assert "PATH" not in open("said").read()
    assert "invalid literal for int() with base 10: 'no number'" in open("said").read()
    assert os.stat(f"/proc/{server.pid}")
"""
SPAWNED_AND_ENDED_AT_ONCE = """
if __name__ == "__main__":
    server = forkserver.SpawnServer()
    with open("said", "w") as said:
        several = [server.start([*WORDS, word], dict(os.environ), said.fileno(), said.fileno()) for word in ("sleep", "print", "sleep")]
    # As torchrun ends it, before it has imported anything.
    os.killpg(several[0].pid, signal.SIGTERM)
    assert several[0].wait(20) == -signal.SIGTERM
    assert several[1].wait(20) == 5
    assert open("said").read() == "printed\\n"
    # The third does not hold up the end of this process.
"""
DOING = """
import os, sys, time
if sys.argv[1:] == ["print"]:
    print("printed")
    os._exit(5)
if "PATH" in os.environ and "LOCAL_RANK" in os.environ:
    print("PATH")
if sys.argv[1:] == ["sleep"]:
    time.sleep(60)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


ENDED = (ENDED_BY_A_SIGNAL_AND_SLOW, SPAWNED, SPAWNED_AND_ENDED_AT_ONCE)


@pytest.mark.parametrize("code", [STANDS_STILL, TOO_LONG, NOBODY_WAITS_FOR_CHILDREN, ANOTHER_MODULE, SEVERAL, *ENDED])
def test_a_request_is_a_process_or_none(tmp_path: Path, code: str) -> None:
    (tmp_path / "doing.py").write_text("if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in DOING.strip().splitlines()))
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"}
    (tmp_path / "asking.py").write_text(BEGIN + code)
    done = subprocess.run([sys.executable, "asking.py"], cwd=tmp_path, env=environment, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
