"""torchrun's agent, extended: real agents, real rendezvous, ranks that only tell what happens to them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.agent.server import WorkerState
from torch.distributed.elastic.multiprocessing import start_processes

from pipeline.launch.agent import Agent as TorchAgent
from pipeline.launch.agent import AttemptLogs
from tests.kit.experiment import ROOT
from tests.kit.waiting import until

pytestmark = pytest.mark.slow
# A rank that writes down that it began, and every SIGTERM that it gets; `doing` is Python code that it runs then.
RANK = """
import os, pathlib, signal, sys, time
if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    me = f"{os.environ['GROUP_RANK']}-{os.environ['LOCAL_RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    signal.signal(signal.SIGTERM, lambda *_: (folder / f"term-{me}").touch())
    (folder / f"began-{me}-of-{os.environ['WORLD_SIZE']}").touch()
    print("a line of", me, flush=True)
    exec(sys.argv[2])
"""


class Agent:
    """An agent, and the events that it has reported."""

    def __init__(self, folder: Path, doing: str, *options: str, ranks: int = 2, code: str = RANK, script: bool = False, **environment: str):
        path = folder / "rank_of_test.py"
        path.write_text(code)
        what = [str(path)] if script else ["-m", "rank_of_test"]
        reader, writer = os.pipe()
        words = [sys.executable, "-m", "pipeline.launch.agent", f"--nproc-per-node={ranks}", f"--log-dir={folder / 'logs'}"]
        words += ["--redirects=3", "--local-addr=127.0.0.1", *options, *what, str(folder), doing]
        variables = (
            os.environ
            | {"LOCKSTEP_EVENTS": str(writer), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            | {"PYTHONPATH": f"{ROOT}:{folder}"}
            | environment
        )
        with (folder / "log").open("a") as log:
            self.process = subprocess.Popen(words, pass_fds=(writer,), cwd=ROOT, env=variables, stderr=log)
        os.close(writer)
        self._pipe, self._seen = os.fdopen(reader), list[str]()

    def until_started(self) -> None:
        """Wait until the agent has said that its ranks run; the ranks themselves may begin before."""
        while not self._seen or '"started"' not in self._seen[-1]:
            self._seen.append(self._pipe.readline())
            assert self._seen[-1], "it ended before that"

    def events(self) -> list[dict[str, Any]]:
        """What the ranks did, once the agent has ended."""
        self.process.wait(60)
        with self._pipe:
            return [event for event in map(json.loads, [*self._seen, *self._pipe]) if event["event"] != "fork-server"]


ALONE = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=alone")


@pytest.mark.parametrize(("level", "script"), [("CRITICAL", False), ("debug", True)])
def test_a_failure_is_reported_with_its_exit_code_whatever_torch_may_log(tmp_path: Path, level: str, script: bool) -> None:
    doing = "time.sleep(60) if os.environ['LOCAL_RANK'] == '0' else sys.exit(5)"
    from pipeline.launch.agent_command import environment
    from pipeline.launch.node import Node

    os.environ["LOGLEVEL"] = level
    try:
        forced = environment(Node(2, 1))["LOGLEVEL"]
    finally:
        del os.environ["LOGLEVEL"]
    agent = Agent(tmp_path, doing, *ALONE, "--max-restarts=1", script=script, LOGLEVEL=forced)
    events = agent.events()
    assert [(event["event"], event["attempt"]) for event in events] == [("started", 0), ("failed", 0), ("started", 1), ("failed", 1)]
    assert events[1]["exit_codes"] == {"1": 5}
    assert agent.process.returncode == 1
    assert not list(tmp_path.glob("term-*")), "a rank that lost its peer is not asked to save"
    for attempt in (0, 1):
        assert "a line of 0-1" in (Path(events[0]["folder"]).parent / f"attempt_{attempt}" / "1" / "stdout.log").read_text()


def test_a_rank_that_was_killed_while_it_wrote_its_error_file_is_started_again(tmp_path: Path) -> None:
    torn = "pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).write_text('{')"
    doing = f"{torn}; time.sleep(0 if os.environ['LOCAL_RANK'] == '1' else 60); os.kill(os.getpid(), 9)"
    events = Agent(tmp_path, doing, *ALONE, "--max-restarts=1").events()
    assert [(event["event"], event["attempt"]) for event in events] == [("started", 0), ("failed", 0), ("started", 1), ("failed", 1)]


def test_torchrun_does_not_look_for_failures_where_we_have_found_none(tmp_path: Path) -> None:
    """A rank that fails between the two would be reported by nobody, and its peers asked by SIGTERM to save."""
    logs = AttemptLogs(log_dir=str(tmp_path))
    ranks = start_processes("ranks", sys.executable, {0: ("-c", ""), 1: ("-c", "import time; time.sleep(60)")}, {0: {}, 1: {}}, logs)
    try:
        ranks.subprocess_handlers[0].proc.wait()
        agent = object.__new__(TorchAgent)
        agent._pcontext = ranks
        assert agent._monitor_workers(None).state == WorkerState.HEALTHY  # type: ignore[arg-type]
        # Where it has looked, it knows of the one that has ended.
        assert ranks._running_local_ranks == {0, 1}
    finally:
        ranks.close(signal.SIGKILL)


def test_any_number_of_signals_is_one_stop_that_ranks_may_take_their_time_for(tmp_path: Path) -> None:
    doing = (
        "[time.sleep(0.05) for _ in range(1200) if not list(folder.glob('term-' + me))]; time.sleep(2); (folder / ('saved-' + me)).touch()"
    )
    agent = Agent(tmp_path, doing, *ALONE)
    until(lambda: len(list(tmp_path.glob("began-*"))) == 2, agent.process)
    agent.until_started()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        agent.process.send_signal(number)
        time.sleep(0.2)
    assert [event["event"] for event in agent.events()] == ["started", "stopping"]
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert agent.process.returncode == 128 + signal.SIGTERM


def test_a_machine_that_joins_restarts_healthy_ranks_without_asking_them_to_stop_and_keeps_their_logs(tmp_path: Path) -> None:
    end = tmp_path / "end"
    doing = f"[time.sleep(0.05) for _ in range(1200) if not os.path.exists({str(end)!r})]"
    options = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29433", "--rdzv-id=two", "--nnodes=1:2", "--rdzv-conf=last_call_timeout=5")
    # How long the first machine waits for another: at its start in vain, then for one that is slow on a busy machine.
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


# What a process finds when it begins.
FACTS = """
import json, os, pathlib, signal, sys, threading, time
PRELOAD = (os.environ["IMPORTED"],)
if __name__ == "__main__":
    variables = {name: value for name, value in os.environ.items() if name not in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "IMPORTED")}
    facts = {
        "variables": {name: value for name, value in variables.items() if name != "LOCKSTEP_AGENT" and "attempt_" not in value},
        "arguments": sys.argv, "path": sys.path, "folder": os.getcwd(), "modules": "torch" in sys.modules,
        "signals": {int(one): str(signal.getsignal(one)) for one in signal.valid_signals()},
        "open": sorted(int(one) for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")),
        "session": os.getsid(0) == os.getpid(), "parent": str(os.getppid()) == os.environ["LOCKSTEP_AGENT"],
        "thread": threading.current_thread() is threading.main_thread(), "flags": [sys.flags.utf8_mode, sys.flags.hash_randomization],
        "title": pathlib.Path("/proc/self/cmdline").read_bytes().decode().rstrip(chr(0)).split(chr(0)),
    }
    print(json.dumps(facts))
    exec(sys.argv[2])
"""


def facts(tmp_path: Path, attempt: int = 0) -> dict[str, Any]:
    (log,) = tmp_path.glob(f"logs/*/attempt_{attempt}/0/stdout.log")
    return dict(json.loads(log.read_text()))


THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
DRIVER = "import pipeline.forkserver as server; server.GPU_DEVICES = __file__; opened = open(__file__)"


def test_a_forked_rank_finds_what_an_executed_one_finds(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for name, code in (("nothing", ""), ("a_thread", THREAD), ("a_driver", DRIVER)):
        folder = tmp_path / f"{name} in a folder with blanks"
        folder.mkdir()
        (folder / f"{name}.py").write_text(code)
        agent = Agent(folder, "pass", *ALONE, ranks=1, code=FACTS, IMPORTED=name)
        assert [event["event"] for event in agent.events()] == ["started"]
        assert agent.process.returncode == 0
        facts_of_one = json.dumps(facts(folder)).replace(str(folder), "FOLDER")
        found.append(json.loads(facts_of_one))
    assert [one.pop("modules") for one in found] == [True, False, False]
    forked, executed, other = found
    assert executed == other
    assert forked.pop("title") == [*executed.pop("title"), "(local rank 0)"]
    assert forked == executed
    assert forked["session"]
    assert forked["parent"]


def test_ranks_are_executed_once_the_fork_server_is_gone(tmp_path: Path) -> None:
    doing = (
        "import psutil\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    servers = [one for one in psutil.process_iter() if one.ppid() == os.getppid() and 'pipeline.forkserver' in one.cmdline()]\n"
        "    [one.kill() for one in servers]\n"
        "    sys.exit(5 if len(servers) == 1 else 6)"
    )
    agent = Agent(tmp_path, doing, *ALONE, "--max-restarts=1", ranks=1, code=FACTS, IMPORTED="json")
    events = agent.events()
    assert [(event["event"], event.get("exit_codes")) for event in events] == [("started", None), ("failed", {"0": 5}), ("started", None)]
    assert agent.process.returncode == 0
    assert [facts(tmp_path, attempt)["modules"] for attempt in (0, 1)] == [True, False]


def test_a_module_that_cannot_be_imported_says_so_in_its_own_log(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "", *ALONE, ranks=1, code="import nothing_of_that_name")
    assert [event.get("exit_codes") for event in agent.events()] == [None, {"0": 1}]
    (log,) = tmp_path.glob("logs/*/attempt_0/0/stderr.log")
    assert "No module named 'nothing_of_that_name'" in log.read_text()


def test_the_fork_server_ends_with_the_agent(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "time.sleep(60)", *ALONE, ranks=1)
    until(lambda: list(tmp_path.glob("began-*")), agent.process)
    (server,) = [one for one in psutil.Process(agent.process.pid).children() if "pipeline.forkserver" in one.cmdline()]
    (rank,) = [one for one in psutil.Process(agent.process.pid).children() if "rank_of_test" in one.cmdline()]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        server.send_signal(number)
    time.sleep(0.5)
    assert server.is_running()
    agent.process.kill()
    rank.kill()
    assert not psutil.wait_procs([server], timeout=10)[1]
    agent.events()
