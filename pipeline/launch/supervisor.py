"""Start torchrun's agent for this machine's ranks, follow it to its end, and end it where starting again cannot help."""

import json
import math
import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

from pipeline.files import atomic_write
from pipeline.job import Job
from pipeline.launch.agent_command import command, environment
from pipeline.launch.failures import FINAL_EXITS, Failure, LaunchResult, exit_reasons, failure_of
from pipeline.launch.node import Node
from pipeline.launch.watchdog import Watchdog
from pipeline.process_tree import adopt_orphans, below, dies_with_parent, kill, wait_for_orphans
from pipeline.stop_signals import STOP_EXITS, StopRequest

POLL_SECONDS = 0.1
# How long to wait for a report from the machine that all others wait for.
REPORT_SECONDS = 5


class Observer(Protocol):
    """Is told of a job while it runs, and decides what the supervisor cannot know."""

    def failed(self, failure: Failure) -> str | None:
        """Return why the ranks are not to be started again, or None."""
        ...

    def say(self, text: str) -> None:
        """Print a line for the user."""
        ...

    def poll(self) -> list[Failure]:
        """Called every tenth of a second; returns the failures that other machines have reported since."""
        ...

    def stop_requested(self) -> bool:
        """Return True if the job is to stop for a request that did not come as a signal to this process while the agent ran."""
        ...

    def is_done(self, idle_seconds: float) -> bool:
        """Return True if the agent should be ended: it has had no rank for `idle_seconds` and waits in vain."""
        ...


def run(module: str, job: Job, node: Node, lock: int | None, observer: Observer, stop: StopRequest) -> LaunchResult:
    """Run a module on this machine's ranks until all its processes have gone; the agent holds the run's lock too."""
    logs = job.run / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}"
    logs.mkdir(parents=True, exist_ok=True)
    atomic_write(logs / "job.json", job.model_dump_json().encode())
    adopt_orphans()
    process, pipe = _start(command(module, node, job.config.dist, logs), environment(node), lock, logs)
    stop.agent_started(process.pid)
    watchdog = Watchdog(logs, node.ranks, node.nodes > 1, job.config.dist.timeout_seconds, observer.say)
    supervisor = Supervisor((process, pipe), node, watchdog, stop, observer)
    try:
        over, oom_killed = supervisor.follow(), watchdog.oom_killed(time.monotonic())
        wait_for_orphans(process.pid, 0 if over else job.config.dist.grace_seconds, lambda: stop.at_once)
    finally:
        kill(process.pid)
        stop.agent_ended()
        os.close(pipe)
    exit_code, result = process.wait(), supervisor.result
    observer.poll()
    result.stopped_by, result.stopped_at_once, result.exit_code = stop.signal, stop.at_once, 0 if over else exit_code
    # Before it has ranks it cannot report that.
    result.agent_was_stopped |= exit_code in STOP_EXITS
    if result.exit_code and node.nodes == 1 and not supervisor.explained:
        # The agent itself may die without a report, of a full disk or for lack of memory; its ranks have left theirs.
        reasons = exit_reasons(supervisor.folder, node.ranks, oom_killed and exit_code == -signal.SIGKILL)
        result.failures, result.unexplained = result.failures + reasons, not reasons
    return result


def _start(words: list[str], variables: dict[str, str], lock: int | None, logs: Path) -> tuple["subprocess.Popen[bytes]", int]:
    reader, writer = os.pipe()
    with (logs / "torchrun.log").open("a") as log:
        process = subprocess.Popen(
            words,
            env=variables | {"LOCKSTEP_EVENTS": str(writer)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(writer,) if lock is None else (writer, lock),
            # A session of its own: Ctrl-C in a terminal reaches us alone, and we pass it on.
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
    os.close(writer)
    return process, reader


class Supervisor:
    """One loop over the agent's events, the ranks' heartbeats, the other machines' reports and the user's signals."""

    def __init__(self, agent: tuple["subprocess.Popen[bytes]", int], node: Node, watchdog: Watchdog, stop: StopRequest, observer: Observer):
        self._process, self._pipe = agent
        self._node, self._watchdog, self._stop, self._observer = node, watchdog, stop, observer
        self._unread, self._report_due, self._fork_server = b"", math.inf, 0
        self.result = LaunchResult()
        # The newest attempt's folder, and whether a failure of it is known.
        self.folder: Path | None = None
        self.explained = False

    def follow(self) -> bool:
        """Return when the agent has ended: True if it was left with nothing to do, False if it ended by itself."""
        busy_at = checked_at = time.monotonic()
        while self._process.poll() is None:
            self._handle_events(POLL_SECONDS)
            for failure in self._observer.poll():
                self._failed(failure)
            self._check_watchdog()
            self._stop.if_orphaned()
            if self._observer.stop_requested():
                self._stop.request()
            now = time.monotonic()
            if self._node.nodes > 1 and now - checked_at > 0.5:
                checked_at = now
                if any(one.pid not in (self._process.pid, self._fork_server) for one in below(self._process.pid)):
                    busy_at = now
                if self._observer.is_done(now - busy_at):
                    return True
        while self._handle_events(0):
            pass
        return False

    def _handle_events(self, seconds: float) -> bool:
        """Wait for events of the agent's for so long, and handle them; returns False once it has closed the pipe."""
        ready, _, _ = select.select([self._pipe], [], [], seconds)
        content = os.read(self._pipe, 1 << 16) if ready else b""
        *lines, self._unread = (self._unread + content).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        if ready and not content:
            # Closed: wait as long as if it had been silent.
            time.sleep(seconds)
        return bool(content)

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            self.folder, self.explained = Path(event["folder"]), False
            self._watchdog.started(self.folder)
        elif kind == "failed":
            codes = {int(rank): code for rank, code in event["exit_codes"].items()}
            folder = Path(event["folder"])
            self._failed(failure_of(folder, event["attempt"], self._node.ranks, codes, self._watchdog.oom_killed))
        elif kind == "fork-server":
            self._fork_server = event["pid"]
        elif kind == "rendezvous-timeout":
            self.result.nobody_came_back = True
        elif kind == "said":
            self._observer.say(event["text"])
        elif kind == "stopping":
            self.result.agent_was_stopped = True
        elif kind == "agent-failed":
            self.result.agent_error = event["cause"]

    def _check_watchdog(self) -> None:
        """Take the watchdog's word for a rank that hangs."""
        failure = self._watchdog.check()
        if failure is not None and self._stop.signal is None:
            self._failed(failure)
        if time.monotonic() > self._report_due:
            # No report from the machine that all wait for: it is gone, and a spare may take its place.
            self._report_due = math.inf
            self._watchdog.kill_ranks()

    def _failed(self, failure: Failure) -> None:
        """Record a failure, and end the job if starting again cannot help."""
        if self._stop.signal is not None and failure.exit_code not in FINAL_EXITS:
            # Whoever is told to stop may end in any way.
            return
        self.result.failures.append(failure)
        self.explained |= failure.host is None
        self.result.given_up = self._observer.failed(failure) or self.result.given_up
        if failure.waiting:
            self._report_due = min(self._report_due, time.monotonic() + REPORT_SECONDS)
        elif failure.exit_code in FINAL_EXITS or self.result.given_up:
            kill(self._process.pid)
