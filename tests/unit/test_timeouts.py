"""What follows from `dist.grace_seconds`."""

from pathlib import Path

from pipeline.config import Dist
from pipeline.launch.agent_command import command
from pipeline.launch.node import Node
from pipeline.timeouts import alarm_seconds, ending_seconds, lock_seconds


def test_all_that_follows_a_stop_request_grows_with_the_grace() -> None:
    for seconds in (alarm_seconds, lock_seconds, ending_seconds):
        assert 0 < seconds(10) - 10 == seconds(300) - 300


def test_torchrun_gives_ranks_the_grace_before_it_kills_them() -> None:
    for grace in (7, 300):
        assert f"--shutdown-timeout={grace}" in command("a.module", Node(2, 1), Dist(grace_seconds=grace), Path("logs"))
