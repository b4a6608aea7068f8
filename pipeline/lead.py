"""The lead command: run a command while other machines can join this one and take part in what it trains."""

import contextlib
import logging
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from socket import socket
from types import FrameType

from pipeline import join
from pipeline.cluster.environment import ClusterEnvironment, detect, machines
from pipeline.cluster.membership import Size
from pipeline.cluster.messages import Clock
from pipeline.cluster.presence import Presence
from pipeline.cluster.store import ClusterStore, serve
from pipeline.config import Config, ConfigError, PeerError
from pipeline.files import Paths
from pipeline.hardware.machine import check_writable
from pipeline.hardware.network import PORT, endpoint, listen
from pipeline.process_tree import NODES, SIZE, STOP_FILE, STORE, TYPED_COMMAND, adopt_orphans, dies_with_parent, wait_for_orphans
from pipeline.runs.status import STOPPED, StopRequested
from pipeline.stop_signals import STOP_SIGNALS, handled_by
from pipeline.timeouts import STORM_SECONDS, ending_seconds

log = logging.getLogger(__name__)

EXIT_FILE = "LOCKSTEP_EXIT_FILE"
# Workers that start together with the leader need this long to join, and learn of a command that had nothing to do for them.
JOIN_SECONDS = 60
# How long they may take to read the exit code.
GOODBYE_SECONDS = 5


def run(config: Config, paths: Paths, words: list[str], workers: str | None, port: int | None, bind: str | None = None) -> int:
    """Run a command, and keep a store open in which workers wait for jobs; returns the exit code of the ranks or the command."""
    if not words:
        raise ConfigError("lead: no command; write for example: python -m pipeline lead dvc repro")
    given = detect(config, os.environ)
    if given is not None and not given.leads:
        return join.run(config, paths, endpoint(given.host, port or given.port))
    check_writable(paths.root)
    if shutil.which(words[0]) is None:
        raise ConfigError(f"lead: no program {words[0]!r} is to be found; write for example: python -m pipeline lead dvc repro")
    least, most = _machines(config, given, workers)
    # torchrun unpickles what it finds in the store: nobody else reaches it where nobody else is to come, and any port will do.
    address = bind or ("127.0.0.1" if most == 1 else None)
    listening = listen(port or (given.port if given else PORT if most > 1 or bind else 0), address)
    number = listening.getsockname()[1]
    log.info("leading %s", _who_joins(least, most, "" if address == "127.0.0.1" else endpoint(bind or os.uname().nodename, number)))
    host = "127.0.0.1" if bind in (None, "0.0.0.0", "::") else bind
    with tempfile.TemporaryDirectory(prefix="lockstep-lead-") as folder:
        verdict = _lead(Command(words, endpoint(host, number), config.dist.grace_seconds, folder), (host, number, listening), least, most)
    if EXIT_FILE in os.environ:
        # An engine may make another code of those of all machines.
        Path(os.environ[EXIT_FILE]).write_text(f"{verdict}\n")
    return verdict


def _lead(command: "Command", where: tuple[str, int, socket], least: int, most: int) -> int:
    adopt_orphans()
    with handled_by(command.relay.on_signal):
        if least < most:
            return _lead_who_is_there(command, serve(*where), least, most)
        command.start(most)
        # While the command begins: this imports torch.
        store = serve(*where)
        return _say_goodbye(command.end(store), command, store, most)


def _machines(config: Config, given: ClusterEnvironment | None, workers: str | None) -> tuple[int, int]:
    """Return how many machines a job needs, and how many it takes."""
    if given is not None:
        least, most = given.least, given.nodes
    elif workers is None:
        least, most = config.dist.nodes, config.dist.nodes
    else:
        least, most = (number + 1 for number in machines("--workers", workers))
    if least < most and not config.dist.auto:
        raise ConfigError(f"--workers: {workers}: a range needs dist.world_size: auto; or write a number")
    # More than lanes there is nothing to do for.
    return least, max(least, min(most, config.dist.pieces)) if config.dist.auto else most


def _lead_who_is_there(command: "Command", store: ClusterStore, least: int, most: int) -> int:
    """Run a command on as many machines as come, and again on those that are left when one is lost."""
    presence, losses, nodes = Presence(store), 0, least
    while True:
        command.relay.watch(0)
        try:
            nodes = presence.wait_for(least, most, command.relay.check, lambda text: log.info("%s", text))
        except (PeerError, StopRequested) as error:
            log.info("%s", error)
            return _say_goodbye(error.exit_code, command, store, nodes)
        log.info("beginning on %d of %s machines", nodes, f"{least} to {most}")
        command.start(nodes, Size(least, most))
        verdict, before = command.end(store), losses
        losses = len(store.since("lost", 0))
        if verdict != PeerError.exit_code or losses == before or command.relay.requested:
            return _say_goodbye(verdict, command, store, nodes)
        log.info("a machine was lost; beginning again with those that are there")
        # What the next start makes of it counts.
        store.put("last-exit-code", None)


def _say_goodbye(verdict: int, command: "Command", store: ClusterStore, nodes: int) -> int:
    store.put("verdict", verdict)
    command.relay.command_ended = True
    wait_for_goodbyes(store, nodes - 1, command.started_at, command.relay)
    return verdict


class Command:
    """What is run below this process, which tells it of the store."""

    def __init__(self, words: list[str], store: str, grace_seconds: int, folder: str):
        self._words, self._store, self._grace_seconds = words, store, grace_seconds
        self.started_at, self.relay = time.monotonic(), SignalRelay(Path(folder) / "stop-requested")

    def start(self, nodes: int, size: Size | None = None) -> None:
        """Start it on so many machines."""
        variables = os.environ | {STORE: self._store, NODES: str(nodes), STOP_FILE: str(self.relay.stop_file)}
        variables[TYPED_COMMAND] = shlex.join(["python", "-m", "pipeline", *sys.argv[1:]])
        variables |= {SIZE: str(size)} if size else {}
        # A session of its own: signals reach us alone, and we decide what becomes of them.
        self._process = subprocess.Popen(self._words, env=variables, start_new_session=True, preexec_fn=dies_with_parent())
        self.relay.watch(self._process.pid)

    def end(self, store: ClusterStore) -> int:
        """Wait for its end; returns the verdict."""
        exit_code = self._process.wait()
        if exit_code < 0:
            # An engine's SIGTERM ends DVC at once, and leaves us its stage, which still saves.
            wait_for_orphans(self._process.pid, ending_seconds(self._grace_seconds), lambda: self.relay.hurried)
        self.relay.command_ended = True
        return verdict_of(exit_code, store, self.relay.requested and not self.relay.insisted)


def _who_joins(least: int, most: int, where: str) -> str:
    others = f"{most - 1} workers" if most > 2 else "1 worker" if most == 2 else "no worker: dist.nodes is 1, unless you say --workers"
    others = f"{least - 1} to {others}" if least < most else others
    return f"{others}; a worker is started with: python -m pipeline join {where}" if where else others


class SignalRelay:
    """Passes signals on to a command: the first as SIGINT, the only one that DVC leaves to its stage; a person's second as it is."""

    def __init__(self, stop_file: Path, command: int = 0):
        self.stop_file, self._command, self._requested_at = stop_file, command, -math.inf
        self.command_ended = False
        # True once a signal says not to wait for workers that have yet to hear of the command's end.
        self.hurried = False
        # True once a person's second one was passed on.
        self.insisted = False

    @property
    def requested(self) -> bool:
        return self._requested_at != -math.inf

    def watch(self, command: int) -> None:
        """Pass signals on to this command from now on, or to none, by 0; at once, if one came while it started."""
        self._command, self.command_ended = command, False
        if command and self.requested:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command, signal.SIGINT)

    def check(self) -> None:
        """Raise StopRequested if a signal has come."""
        if self.requested:
            raise StopRequested("stopped on request while it waited for machines")

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on, unless it belongs to the same request as the first: engines signal all processes at once, several times."""
        now, first = time.monotonic(), not self.requested
        if first:
            self._requested_at = now
            # DVC goes on to the next stage where the one before had nothing left to stop.
            with contextlib.suppress(OSError):
                self.stop_file.touch()
        elif now < self._requested_at + STORM_SECONDS:
            return
        if self.command_ended or not self._command:
            # Its process group may be another's by now. Where the next one is yet to begin, workers are to hear of it.
            self.hurried = self.command_ended or not first
            return
        self.insisted = not first
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._command, signal.SIGINT if first else number)


def verdict_of(exit_code: int, store: ClusterStore, stop_requested: bool = False) -> int:
    """Return the exit code of the ranks if they are why the command failed: DVC makes 255 of all of them."""
    last: int | None = store.get("last-exit-code")
    if stop_requested and not last and (exit_code > 0 or -exit_code in STOP_SIGNALS):
        # It was stopped where it had no ranks, and goes on if it is started again.
        return STOPPED
    if exit_code < 0 and last != STOPPED:
        return 128 - exit_code
    return last if exit_code and last else abs(exit_code)


def wait_for_goodbyes(store: ClusterStore, expected: int, started_at: float, relay: SignalRelay, clock: Clock = time) -> None:
    """Wait until the workers have read the verdict; also those that are still starting, for a shorter time if all were asked to stop."""
    came: set[str] = set()
    began_at = changed_at = looked_at = clock.monotonic()
    while not relay.hurried:
        now, before = clock.monotonic(), came
        came = set(store.since("workers", 0))
        if came != before or now > looked_at + GOODBYE_SECONDS:
            # Somebody is new; or this process was stopped, and the workers perhaps too.
            changed_at = now
        looked_at = now
        # Who is just starting while all are asked to stop has a moment to read it.
        until = began_at + GOODBYE_SECONDS if relay.requested else started_at + JOIN_SECONDS
        nobody_more = len(came) >= expected or now > until
        if nobody_more and (came <= set(store.since("goodbyes", 0)) or now > changed_at + GOODBYE_SECONDS):
            return
        clock.sleep(0.1)
