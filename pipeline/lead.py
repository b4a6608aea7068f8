"""The lead command: lend this machine's port to a command, so that other machines can take part in what it trains."""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from threading import Event
from types import FrameType

from pipeline import join
from pipeline.cluster.environment import engine
from pipeline.cluster.store import ClusterStore
from pipeline.config import Config, ConfigError
from pipeline.files import Paths
from pipeline.hardware.machine import check_writable
from pipeline.hardware.network import PORT, listen
from pipeline.launch.node import NODES, STORE
from pipeline.launch.process_tree import dies_with_parent

log = logging.getLogger(__name__)

# Workers that start together with the leader need this long to come, and hear of a command that had nothing to do for them.
COME_SECONDS = 60
# How long they may take to hear the verdict.
GOODBYE_SECONDS = 5


def run(config: Config, paths: Paths, words: list[str], workers: int | None, port: int | None) -> int:
    """Run a command with a meeting place for workers, and tell them how it ended; returns the exit code of what it ran."""
    if not words:
        raise ConfigError("lead: no command; write for example: python -m pipeline lead dvc repro")
    given = engine(config, os.environ)
    if given is not None and not given.leads:
        return join.run(config, paths, f"{given.host}:{given.port}")
    check_writable(paths.root)
    if shutil.which(words[0]) is None:
        raise ConfigError(f"lead: no program {words[0]!r} is to be found; write for example: python -m pipeline lead dvc repro")
    nodes = given.nodes if given else config.dist.nodes if workers is None else workers + 1
    number = given.port if given else port or PORT
    started_at = time.monotonic()
    listening = listen(number)
    others = f"{nodes - 1} workers" if nodes > 2 else "1 worker" if nodes == 2 else "no worker: dist.nodes is 1, unless you say --workers"
    log.info("leading %s; a worker is started with: python -m pipeline join %s:%d", others, os.uname().nodename, number)
    variables = os.environ | {STORE: f"127.0.0.1:{number}", NODES: str(nodes)}
    # A session of its own: signals reach us alone, and we decide what becomes of them.
    process = subprocess.Popen(words, env=variables, start_new_session=True, preexec_fn=dies_with_parent())
    with _passing_on(process) as hurried:
        # While the command begins: this imports torch.
        meeting = ClusterStore("127.0.0.1", number, listening)
        verdict = _verdict(process.wait(), meeting)
        meeting.put("verdict", verdict)
        _say_goodbye(meeting, nodes - 1, started_at, hurried)
    return verdict


@contextmanager
def _passing_on(process: "subprocess.Popen[bytes]") -> Generator[Event]:
    """The first signal reaches the command as Ctrl-C, the only one that DVC leaves to its stage; the second as it is.

    The event tells of one that came when the command had ended.
    """
    asked, hurried = False, Event()

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal asked
        if process.returncode is not None:
            hurried.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number if asked else signal.SIGINT)
        asked = True

    # Under nohup the end of a terminal is no reason to stop.
    numbers = [one for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield hurried
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _verdict(code: int, meeting: ClusterStore) -> int:
    """The exit code of the ranks where they are why the command failed: DVC makes 255 of all of them."""
    last: int | None = meeting.get("last")
    if code < 0:
        return 128 - code
    return last if code and last else code


def _say_goodbye(meeting: ClusterStore, expected: int, started_at: float, hurried: Event) -> None:
    """Keep the meeting open until the workers have heard; those that are still starting too."""
    came: set[str] = set()
    changed_at = time.monotonic()
    while not hurried.wait(0.1):
        now, before = time.monotonic(), came
        came = set(meeting.since("workers", 0))
        changed_at = now if came != before else changed_at
        nobody_more = len(came) >= expected or now > started_at + COME_SECONDS
        if nobody_more and (came <= set(meeting.since("goodbyes", 0)) or now > changed_at + GOODBYE_SECONDS):
            return
