"""Start torchrun for this machine's ranks, pass on signals, wait until all its processes have gone, and say what failed first."""

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Protocol

from pipeline.files import atomic_write
from pipeline.job import Job
from pipeline.launch.failures import HUNG, Failure, LaunchResult, cause_of, exit_reasons, first_lost, folder_of, newest_attempt, snapshot_of
from pipeline.launch.node import Node
from pipeline.launch.process_tree import adopt_orphans, below, dies_with_parent, kill, wait_for_orphans
from pipeline.launch.signals import Stopper
from pipeline.launch.watchdog import Watchdog

# Whether it gets on decides when it is enough, not a number.
MAX_RESTARTS = 1_000_000
# What a rank may take to save and leave after a signal.
GRACE_SECONDS = 60
# How long the others wait for a machine that was lost to come back.
RETURN_SECONDS = 600
FINAL_EXITS = (2, 3, 4, 5, HUNG)
# How long to wait for the word of the machine that all wait for.
WORD_SECONDS = 5
# What torchrun says to those that outlive the one that failed.
CLOSING = re.compile(r"Sending process (\d+) closing signal")
FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")


class Observer(Protocol):
    """Who hears of a job while it runs."""

    def failed(self, failure: Failure) -> str | None:
        """A rank has failed; why there is no use in another start, or None."""
        ...

    def say(self, text: str) -> None:
        """Something that people should know."""
        ...

    def heard(self) -> list[Failure]:
        """Called all the time; what has failed on other machines since."""
        ...

    def asked_to_stop(self) -> bool:
        """Whether another machine of the job was told to stop."""
        ...

    def over(self, idle_seconds: float) -> bool:
        """Whether the job is over though torchrun still runs; for so long it has had no rank."""
        ...


def run(module: str, job: Job, node: Node, lock: int | None, observer: Observer) -> LaunchResult:
    """Run a module on this machine's ranks; the observer hears of every failure."""
    logs = job.run / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}"
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "torchrun.log").touch()
    atomic_write(logs / "job.json", job.model_dump_json().encode())
    watch = LaunchResult()
    adopt_orphans()
    process = _start(_command(module, node, logs), environment(node), lock)
    with Stopper(process.pid) as stopper:
        watchdog = Watchdog(logs, node.ranks, node.nodes > 1, job.config.dist.timeout_seconds, observer.say)
        reader = _Reader(process, logs, watch, stopper, observer, watchdog)
        reader.start()
        try:
            over = _follow(process, node, stopper, reader, observer)
            wait_for_orphans(process.pid, 0 if over else GRACE_SECONDS, lambda: stopper.at_once)
        finally:
            kill(process.pid)
    observer.heard()
    watch.stopped_by, watch.stopped_at_once = stopper.signal, stopper.at_once
    watch.exit_code = 0 if over else process.wait()
    if watch.exit_code and node.nodes == 1 and newest_attempt(logs) not in {one.attempt for one in watch.failures}:
        # On a full disk torchrun itself may die without a word; its ranks have left theirs.
        told = exit_reasons(logs, node.ranks)
        watch.failures, watch.unexplained = watch.failures + told, not told
    return watch


def _follow(process: "subprocess.Popen[str]", node: Node, stopper: Stopper, reader: "_Reader", observer: Observer) -> bool:
    """Wait for torchrun, or until it has nothing more to do; whether it was the latter."""
    busy_at = looked_at = time.monotonic()
    while process.poll() is None:
        for failure in observer.heard():
            reader.take(failure)
        reader.watch()
        stopper.if_orphaned()
        if observer.asked_to_stop():
            stopper.ask()
        now = time.monotonic()
        if node.nodes > 1 and now - looked_at > 0.5:
            looked_at = now
            if any(one.pid != process.pid for one in below(process.pid)):
                busy_at = now
            if observer.over(now - busy_at):
                return True
        time.sleep(0.1)
    reader.join(5)
    return False


def _start(command: list[str], variables: dict[str, str], lock: int | None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        pass_fds=() if lock is None else (lock,),
        # A session of its own: Ctrl-C in a terminal reaches us alone, and we decide what becomes of it.
        start_new_session=True,
        preexec_fn=dies_with_parent(),
    )


def _command(module: str, node: Node, logs: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={node.nodes}", f"--nproc-per-node={node.ranks}", f"--local-addr={node.address}"),
        # The id keeps two jobs apart. With several machines the store is the leader's, who keeps it through all of a job.
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={node.endpoint}", f"--rdzv-id={node.job_id}"),
        f"--rdzv-conf=is_host={str(node.nodes == 1).lower()},join_timeout={RETURN_SECONDS}",
        *(f"--max-restarts={MAX_RESTARTS}", f"--shutdown-timeout={GRACE_SECONDS}"),
        *(f"--log-dir={logs}", "--redirects=3"),
        *("-m", module, str(logs / "job.json")),
    ]


def environment(node: Node) -> dict[str, str]:
    """What torchrun and its ranks are started with."""
    here = str(Path(__file__).parents[2])
    # torchrun reads PET_*, which an engine has set for the command above us.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    # Who knows the network better says so.
    network = {"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": f"={node.interface}"}
    return (
        network
        | kept
        | {
            "PYTHONPATH": os.pathsep.join([here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep),
            "OMP_NUM_THREADS": str(node.threads),
            "MKL_NUM_THREADS": str(node.threads),
            # Every attempt gets an address of its own for its store.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "LOCKSTEP_LEADS": str(int(node.leads)),
            # cuBLAS is deterministic only with a workspace of fixed size.
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
    )


class _Reader(threading.Thread):
    """Keeps what torchrun says, and takes the failures out of it."""

    def __init__(
        self, process: "subprocess.Popen[str]", logs: Path, watch: LaunchResult, stopper: Stopper, observer: Observer, watchdog: Watchdog
    ):
        super().__init__(daemon=True)
        self._process, self._logs, self._watch, self._stopper = process, logs, watch, stopper
        self._observer, self._watchdog, self._hung_at = observer, watchdog, math.inf

    def run(self) -> None:
        """Until torchrun has said all."""
        assert self._process.stderr is not None
        attempt, closed = 0, set[int]()
        for line in self._process.stderr:
            # On a full disk the ranks' own words are what counts.
            with contextlib.suppress(OSError), (self._logs / "torchrun.log").open("a") as log:
                log.write(line)
            self._watch.nobody_came_back |= "RendezvousTimeoutError" in line
            self._watch.torchrun_was_stopped |= "SignalException" in line
            if found := CLOSING.search(line):
                closed.add(int(found[1]))
            if found := FAILED.search(line):
                local_rank, exit_code = int(found[2]), int(found[1])
                if int(found[3]) in closed:
                    # Of two in one second torchrun names any; the first is the one that it did not have to end.
                    local_rank, exit_code = first_lost(self._logs, attempt, closed) or (local_rank, exit_code)
                self.take(self._failure(attempt, local_rank, exit_code))
                attempt, closed = attempt + 1, set()

    def _failure(self, attempt: int, local_rank: int, exit_code: int) -> Failure:
        folder = folder_of(self._logs, attempt, local_rank)
        sign = snapshot_of(folder)
        oom_killed = exit_code == -signal.SIGKILL and self._watchdog.oom_killed()
        rank, step = (sign.rank, sign.step) if sign else (local_rank, -1)
        return Failure(rank, exit_code, cause_of(folder), attempt, step, oom_killed)

    def watch(self) -> None:
        """See whether a rank hangs."""
        failure = self._watchdog.look()
        if failure is not None and self._stopper.signal is None:
            self.take(failure)
        if time.monotonic() > self._hung_at + WORD_SECONDS:
            # No word from the machine that all wait for: it is gone, and a spare may take its place.
            self._hung_at = math.inf
            self._watchdog.kill_ranks()

    def take(self, failure: Failure) -> None:
        """Note a failure, and end the job where trying again cannot help."""
        if self._stopper.signal is not None and failure.exit_code not in FINAL_EXITS:
            # Whoever is told to stop may end in any way.
            return
        self._watch.failures.append(failure)
        self._watch.given_up = self._observer.failed(failure) or self._watch.given_up
        if failure.waiting:
            self._hung_at = min(self._hung_at, time.monotonic())
        elif failure.exit_code in FINAL_EXITS or self._watch.given_up:
            kill(self._process.pid)
