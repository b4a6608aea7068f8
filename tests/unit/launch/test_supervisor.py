"""What an agent reports comes to the user."""

import os
import subprocess
from pathlib import Path

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
