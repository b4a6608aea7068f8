"""What a launcher makes of signals, from before its agent starts until MLflow has been waited for."""

import io
import os
import signal
import subprocess
import sys

import pytest

from pipeline import stop_signals
from pipeline.stop_signals import StopRequest, deferred, handled_by
from tests.kit.experiment import ROOT

AGENT = "import signal, time; signal.signal(15, lambda *_: exit(7)); print(flush=True); time.sleep(60)"

# Ctrl-C while a command imports what it needs.
INTERRUPTED = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "pydantic":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["pipeline", "train"]
runpy.run_module("pipeline", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def agent():
    with subprocess.Popen([sys.executable, "-c", AGENT], start_new_session=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_request_before_the_agent_reaches_it_once_it_is_there(agent) -> None:
    stop = StopRequest()
    with handled_by(stop.on_signal):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        stop.agent_started(agent.pid)
        assert agent.wait(10) == 7
        stop.agent_ended()
        # An engine's next one.
        os.kill(os.getpid(), signal.SIGHUP)
    assert (stop.signal, stop.at_once, stop.hurried.is_set()) == (signal.SIGTERM, False, False)


def test_a_persons_second_request_kills_and_after_the_ranks_it_ends_the_wait(agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "STORM_SECONDS", 0)
    stop = StopRequest()
    agent.send_signal(signal.SIGSTOP)
    stop.agent_started(agent.pid)
    stop.on_signal(signal.SIGINT, None)
    assert (stop.signal, stop.at_once) == (signal.SIGINT, False)
    stop.on_signal(signal.SIGTERM, None)
    assert agent.wait(10) == -signal.SIGKILL
    assert (stop.signal, stop.at_once, stop.hurried.is_set()) == (signal.SIGTERM, True, False)
    stop.agent_ended()
    stop.on_signal(signal.SIGINT, None)
    assert stop.hurried.is_set()


def test_after_the_ranks_a_first_signal_ends_the_wait_and_stops_nothing() -> None:
    stop = StopRequest()
    stop.agent_ended()
    stop.on_signal(signal.SIGINT, None)
    assert (stop.signal, stop.hurried.is_set()) == (None, True)


def test_under_nohup_the_end_of_a_terminal_is_no_reason_to_stop() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferred() as signalled:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signalled.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            assert signalled.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_while_a_command_imports_shows_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("number", "terminal", "told"), [(signal.SIGINT, True, True), (signal.SIGTERM, True, False), (signal.SIGINT, False, False)]
)
def test_a_person_at_a_terminal_is_told_that_it_stops(number: int, terminal: bool, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.openpty() if terminal else os.pipe()
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        stop = StopRequest()
        stop.on_signal(number, None)
        # Of the same request.
        stop.on_signal(number, None)
        stream.write("end\n")
        said = os.read(reader, 1000).decode()
    os.close(reader)
    assert stop.signal == number
    assert (said.count("stopping, which takes some seconds; Ctrl-C after three seconds ends it at once") == 1) == told
    assert told or said.strip() == "end"


def test_the_wait_that_a_person_is_told_of_is_that_of_a_storm() -> None:
    assert stop_signals.STORM_SECONDS == 3
