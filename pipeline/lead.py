"""The lead command: run a command while other machines can join this one and take part in what it trains."""

import contextlib
import logging
import math
import os
import shutil
import signal
import subprocess
import time
from types import FrameType

from pipeline import join
from pipeline.cluster.environment import detect
from pipeline.cluster.messages import Clock
from pipeline.cluster.store import ClusterStore, serve
from pipeline.config import Config, ConfigError
from pipeline.files import Paths
from pipeline.hardware.machine import check_writable
from pipeline.hardware.network import PORT, endpoint, listen
from pipeline.process_tree import NODES, STORE, adopt_orphans, dies_with_parent, wait_for_orphans
from pipeline.runs.status import STOPPED
from pipeline.stop_signals import handled_by
from pipeline.timeouts import STORM_SECONDS, ending_seconds

log = logging.getLogger(__name__)

# Workers that start together with the leader need this long to join, and learn of a command that had nothing to do for them.
JOIN_SECONDS = 60
# How long they may take to read the exit code.
GOODBYE_SECONDS = 5


def run(config: Config, paths: Paths, words: list[str], workers: int | None, port: int | None, bind: str | None = None) -> int:
    """Run a command, and keep a store open in which workers wait for jobs; returns the exit code of the ranks or the command."""
    if not words:
        raise ConfigError("lead: no command; write for example: python -m pipeline lead dvc repro")
    given = detect(config, os.environ)
    if given is not None and not given.leads:
        return join.run(config, paths, endpoint(given.host, port or given.port))
    check_writable(paths.root)
    if shutil.which(words[0]) is None:
        raise ConfigError(f"lead: no program {words[0]!r} is to be found; write for example: python -m pipeline lead dvc repro")
    nodes = given.nodes if given else config.dist.nodes if workers is None else workers + 1
    number = port or (given.port if given else PORT)
    started_at = time.monotonic()
    # torchrun unpickles what it finds in the store: nobody else reaches it where nobody else is to come.
    address = bind or ("127.0.0.1" if nodes == 1 else None)
    listening = listen(number, address)
    log.info("leading %s", _who_joins(nodes, "" if address == "127.0.0.1" else endpoint(bind or os.uname().nodename, number)))
    host = "127.0.0.1" if bind in (None, "0.0.0.0", "::") else bind
    variables = os.environ | {STORE: endpoint(host, number), NODES: str(nodes)}
    # A session of its own: signals reach us alone, and we decide what becomes of them.
    process = subprocess.Popen(words, env=variables, start_new_session=True, preexec_fn=dies_with_parent())
    adopt_orphans()
    relay = SignalRelay(process.pid)
    with handled_by(relay.on_signal):
        # While the command begins: this imports torch.
        store = serve(host, number, listening)
        exit_code = process.wait()
        if exit_code < 0:
            # An engine's SIGTERM ends DVC at once, and leaves us its stage, which still saves.
            wait_for_orphans(process.pid, ending_seconds(config.dist.grace_seconds), lambda: relay.hurried)
        relay.command_ended = True
        verdict = verdict_of(exit_code, store, relay.requested)
        store.put("verdict", verdict)
        wait_for_goodbyes(store, nodes - 1, started_at, relay)
    return verdict


def _who_joins(nodes: int, where: str) -> str:
    others = f"{nodes - 1} workers" if nodes > 2 else "1 worker" if nodes == 2 else "no worker: dist.nodes is 1, unless you say --workers"
    return f"{others}; a worker is started with: python -m pipeline join {where}" if where else others


class SignalRelay:
    """Passes signals on to a command: the first as SIGINT, the only one that DVC leaves to its stage; a person's second as it is."""

    def __init__(self, command: int):
        self._command, self._requested_at = command, -math.inf
        self.command_ended = False
        # True once a signal says not to wait for workers that have yet to hear of the command's end.
        self.hurried = False

    @property
    def requested(self) -> bool:
        return self._requested_at != -math.inf

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on, unless it belongs to the same request as the first: engines signal all processes at once, several times."""
        now, first = time.monotonic(), not self.requested
        if first:
            self._requested_at = now
        elif now < self._requested_at + STORM_SECONDS:
            return
        if self.command_ended:
            # Its process group may be another's by now.
            self.hurried = True
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._command, signal.SIGINT if first else number)


def verdict_of(exit_code: int, store: ClusterStore, stop_requested: bool = False) -> int:
    """Return the exit code of the ranks if they are why the command failed: DVC makes 255 of all of them."""
    last: int | None = store.get("last-exit-code")
    if exit_code > 0 and last is None and stop_requested:
        # It was stopped before it had ranks, and goes on if it is started again.
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
