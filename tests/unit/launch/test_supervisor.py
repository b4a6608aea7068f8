"""What an agent reports comes to the user."""

import os
import subprocess
from itertools import chain, repeat
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.hardware import cgroup
from pipeline.job import Job
from pipeline.launch import supervisor
from pipeline.launch.failures import Failure
from pipeline.launch.node import Node
from pipeline.launch.supervisor import Supervisor
from pipeline.launch.watchdog import Watchdog
from pipeline.stop_signals import StopRequest


class Listener:
    """An observer that keeps what it is told to say."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def failed(self, failure: Failure) -> str | None:
        return None

    def say(self, text: str) -> None:
        self.said.append(text)

    def poll(self) -> list[Failure]:
        return []

    def stop_requested(self) -> bool:
        return False

    def is_done(self, idle_seconds: float) -> bool:
        return False


def test_what_an_agent_says_is_said(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    words = ["bash", "-c", f"""printf '%s\\n' '{{"event": "said", "text": "a machine is left out"}}' >&{writer}"""]
    agent = subprocess.Popen(words, pass_fds=(writer,))
    os.close(writer)
    listener = Listener()
    watchdog = Watchdog(tmp_path, 1, False, 60, listener.say)
    Supervisor((agent, reader), Node(1, 1), watchdog, StopRequest(), listener).follow()
    os.close(reader)
    assert listener.said == ["a machine is left out"]


@pytest.mark.parametrize(("ends", "kills", "known"), [("kill -9 $$", 1, True), ("kill -9 $$", 0, False), ("exit 1", 1, False)])
def test_an_agent_without_a_report_ran_out_of_memory_only_where_the_kernel_killed_it(
    ends: str, kills: int, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = chain([0], repeat(kills))
    monkeypatch.setattr(cgroup, "oom_kills", lambda: next(counts))
    monkeypatch.setattr(supervisor, "command", lambda *_: ["bash", "-c", ends])
    job = Job(config=Config(), device="cpu", backend="gloo", precision="fp32", prepared=tmp_path, run=tmp_path)
    result = supervisor.run("none", job, Node(1, 1), None, Listener(), StopRequest())
    assert [one.out_of_memory for one in result.failures] == [True] * known
    assert result.unexplained is not known
