"""Start torchrun, pass on signals, wait until every one of its processes has gone, and say what failed first."""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from pipeline.config import Dist

MAX_RESTARTS = 3
# What a rank may take to save and leave after a signal.
GRACE_SECONDS = 60
FINAL_EXITS = (2, 3, 4, 5)
FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Failure:
    """The first rank that failed in an attempt."""

    rank: int
    exit_code: int
    cause: str
    attempt: int

    @property
    def signal(self) -> str | None:
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else None


@dataclass
class Watch:
    """What happened while torchrun ran."""

    stopped_by: int | None = None
    stopped_at_once: bool = False
    exit_code: int = 0
    failures: list[Failure] = field(default_factory=list[Failure])


def run(module: str, job: Path, dist: Dist, lock: int, tell: Callable[[Failure], None], tick: Callable[[], None]) -> Watch:
    """Run a module on so many ranks; `tell` hears of every failure, `tick` is called while they work."""
    logs = job.parent / "logs" / time.strftime("%Y%m%d-%H%M%S")
    logs.mkdir(parents=True, exist_ok=True)
    watch = Watch()
    process = _start(_command(module, job, dist.world_size, logs), environment(dist.threads_per_rank), lock)
    reader = threading.Thread(target=_read, args=(process, logs, watch, tell), daemon=True)
    with _Stopper(process, watch) as stopper:
        reader.start()
        try:
            while process.poll() is None:
                tick()
                stopper.if_orphaned()
                time.sleep(0.1)
            reader.join(5)
            _wait_for_orphans(process.pid, watch)
        finally:
            _kill(process.pid)
    tick()
    watch.exit_code = process.returncode
    return watch


def _start(command: list[str], variables: dict[str, str], lock: int) -> subprocess.Popen[str]:
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    if prctl:
        # Orphans of torchrun become our children, so that we can wait for them.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    return subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(lock,),
        # A session of its own: Ctrl-C in a terminal reaches us alone, and we decide what becomes of it.
        start_new_session=True,
        preexec_fn=(lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)) if prctl else None,
    )


def _command(module: str, job: Path, world_size: int, logs: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=1", f"--nproc-per-node={world_size}"),
        # Port 0: the system chooses a free one, and the id keeps two jobs apart.
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={uuid.uuid4().hex}", "--local-addr=127.0.0.1"),
        *(f"--max-restarts={MAX_RESTARTS}", f"--shutdown-timeout={GRACE_SECONDS}"),
        *(f"--log-dir={logs}", "--redirects=3"),
        *("-m", module, str(job)),
    ]


def environment(threads: int) -> dict[str, str]:
    """What torchrun and its ranks are started with."""
    here = str(Path(__file__).parents[2])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        # cuBLAS is deterministic only with a workspace of fixed size.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def dvc_above() -> psutil.Process | None:
    """The DVC that started this process, if one did."""
    return next((one for one in psutil.Process().parents() if _is_dvc(one)), None)


def _is_dvc(process: psutil.Process) -> bool:
    try:
        return process.is_running() and "dvc" in (Path(word).name for word in process.cmdline()[:3])
    except psutil.Error:
        # Gone, or a zombie.
        return False


class _Stopper:
    """The first signal asks the ranks to stop, the second ends everything at once."""

    def __init__(self, process: subprocess.Popen[str], watch: Watch):
        self._process, self._watch = process, watch
        self._dvc = dvc_above()

    def __enter__(self) -> "_Stopper":
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        if self._before[signal.SIGHUP] == signal.SIG_IGN:
            # Under nohup the end of a terminal is no reason to stop.
            del self._before[signal.SIGHUP]
        for number in self._before:
            signal.signal(number, self.on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_signal(self, number: int, _: FrameType | None) -> None:
        if self._watch.stopped_by is not None:
            self._watch.stopped_at_once = True
            self._watch.stopped_by = number
            _kill(self._process.pid)
            return
        self._watch.stopped_by = number
        self._process.send_signal(signal.SIGTERM)

    def if_orphaned(self) -> None:
        """DVC has gone and left us running: nobody would hear of the end, so stop and keep what there is."""
        if self._watch.stopped_by is None and self._dvc is not None and not _is_dvc(self._dvc):
            self.on_signal(signal.SIGTERM, None)


def _read(process: subprocess.Popen[str], logs: Path, watch: Watch, tell: Callable[[Failure], None]) -> None:
    """Keep what torchrun says, and take the failures out of it."""
    assert process.stderr is not None
    with (logs / "torchrun.log").open("w") as log:
        attempt = 0
        for line in process.stderr:
            log.write(line)
            log.flush()
            found = FAILED.search(line)
            if found is None or watch.stopped_by is not None or watch.stopped_at_once:
                continue
            exit_code, rank = int(found[1]), int(found[2])
            failure = Failure(rank, exit_code, cause_of(logs, attempt, rank), attempt)
            attempt += 1
            watch.failures.append(failure)
            if exit_code in FINAL_EXITS:
                # Trying again cannot help.
                _kill(process.pid)
            tell(failure)


def cause_of(logs: Path, attempt: int, rank: int) -> str:
    """What a rank said last: its own error, or the last line it wrote."""
    for path in logs.glob(f"*/attempt_{attempt}/{rank}/error.json"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            message: Any = json.loads(path.read_text())["message"]
            return str(message if isinstance(message, str) else message["message"]).strip()
    for path in logs.glob(f"*/attempt_{attempt}/{rank}/stderr.log"):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return lines[-1].strip()
    return ""


def _wait_for_orphans(torchrun: int, watch: Watch) -> None:
    """torchrun is gone; its ranks may still be saving."""
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until and not watch.stopped_at_once and _members(torchrun):
        time.sleep(0.1)


def _members(torchrun: int) -> list[psutil.Process]:
    """Our living descendants that torchrun started: those of its session, and of sessions that its ranks opened."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, ChildProcessError):
            if os.getsid(child.pid) == os.getsid(0):
                continue
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
            elif child.pid != torchrun:
                os.waitpid(child.pid, os.WNOHANG)
    return found


def _kill(torchrun: int) -> None:
    """End torchrun and all that it started, at once."""
    for member in _members(torchrun):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
