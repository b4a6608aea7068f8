"""torchrun's agent, extended: real agents, real rendezvous, ranks that only tell what happens to them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit.experiment import ROOT
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
# A rank that writes down that it began, and every SIGTERM that it gets; `doing` is Python code that it runs then.
RANK = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
me = f"{os.environ['GROUP_RANK']}-{os.environ['LOCAL_RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
signal.signal(signal.SIGTERM, lambda *_: (folder / f"term-{me}").touch())
(folder / f"began-{me}-of-{os.environ['WORLD_SIZE']}").touch()
print("a line of", me, flush=True)
exec(sys.argv[2])
"""


class Agent:
    """An agent, and the events that it has reported."""

    def __init__(self, folder: Path, doing: str, *options: str, ranks: int = 2, **environment: str):
        script = folder / "rank.py"
        script.write_text(RANK)
        reader, writer = os.pipe()
        words = [sys.executable, "-m", "pipeline.launch.agent", f"--nproc-per-node={ranks}", f"--log-dir={folder / 'logs'}"]
        words += ["--redirects=3", "--local-addr=127.0.0.1", *options, str(script), str(folder), doing]
        variables = (
            os.environ
            | {"LOCKSTEP_EVENTS": str(writer), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            | environment
        )
        with (folder / "log").open("a") as log:
            self.process = subprocess.Popen(words, pass_fds=(writer,), cwd=ROOT, env=variables, stderr=log)
        os.close(writer)
        self._pipe = os.fdopen(reader)

    def events(self) -> list[dict[str, Any]]:
        """All events, once the agent has ended."""
        self.process.wait(60)
        with self._pipe:
            return [json.loads(line) for line in self._pipe]


ALONE = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=alone")


@pytest.mark.parametrize("level", ["CRITICAL", "debug"])
def test_a_failure_is_reported_with_its_exit_code_whatever_torch_may_log(tmp_path: Path, level: str) -> None:
    doing = "time.sleep(60) if os.environ['LOCAL_RANK'] == '0' else sys.exit(5)"
    from pipeline.launch.agent_command import environment
    from pipeline.launch.node import Node

    os.environ["LOGLEVEL"] = level
    try:
        forced = environment(Node(2, 1))["LOGLEVEL"]
    finally:
        del os.environ["LOGLEVEL"]
    agent = Agent(tmp_path, doing, *ALONE, "--max-restarts=1", LOGLEVEL=forced)
    events = agent.events()
    assert [(event["event"], event["attempt"]) for event in events] == [("started", 0), ("failed", 0), ("started", 1), ("failed", 1)]
    assert events[1]["exit_codes"] == {"1": 5}
    assert agent.process.returncode == 1
    assert not list(tmp_path.glob("term-*")), "a rank that lost its peer is not asked to save"
    for attempt in (0, 1):
        assert "a line of 0-1" in (Path(events[0]["folder"]).parent / f"attempt_{attempt}" / "1" / "stdout.log").read_text()


def test_any_number_of_signals_is_one_stop_that_ranks_may_take_their_time_for(tmp_path: Path) -> None:
    doing = (
        "[time.sleep(0.05) for _ in range(1200) if not list(folder.glob('term-' + me))]; time.sleep(2); (folder / ('saved-' + me)).touch()"
    )
    agent = Agent(tmp_path, doing, *ALONE)
    until(lambda: len(list(tmp_path.glob("began-*"))) == 2, agent.process)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        agent.process.send_signal(number)
        time.sleep(0.2)
    assert [event["event"] for event in agent.events()] == ["started", "stopping"]
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert agent.process.returncode == 128 + signal.SIGTERM


def test_a_machine_that_joins_restarts_healthy_ranks_without_asking_them_to_stop_and_keeps_their_logs(tmp_path: Path) -> None:
    end = tmp_path / "end"
    doing = f"[time.sleep(0.05) for _ in range(1200) if not os.path.exists({str(end)!r})]"
    options = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29433", "--rdzv-id=two", "--nnodes=1:2", "--rdzv-conf=last_call_timeout=1")
    one = Agent(tmp_path, doing, *options, ranks=1)
    until(lambda: list(tmp_path.glob("began-0-0-0-of-1")), one.process)
    other = Agent(tmp_path, doing, *options, ranks=1)
    until(lambda: len(list(tmp_path.glob("began-*-of-2"))) == 2, one.process)
    end.touch()
    events = one.events()
    other.events()
    assert not list(tmp_path.glob("term-*"))
    assert [event["attempt"] for event in events if event["event"] == "started"] == [0, 1]
    assert (one.process.returncode, other.process.returncode) == (0, 0)
    first = Path(next(event["folder"] for event in events))
    assert first.name == "attempt_0"
    assert (first.parent / "attempt_1" / "0" / "stdout.log").exists()
    assert "a line of 0-0-0" in (first / "0" / "stdout.log").read_text()
