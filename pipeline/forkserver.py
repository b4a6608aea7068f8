"""A process that imports a module once, and from which others are forked that run it: each saves seconds of imports.

What is forked is a child of whoever asks, as if it had been executed, and has its own session, environment and output.
"""

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, TracebackType

import psutil

from pipeline.process_tree import PR_SET_PDEATHSIG, adopt_orphans
from pipeline.stop_signals import STOP_SIGNALS
from pipeline.timeouts import FORK_SECONDS

# A request is sent whole: the words, what of the environment differs, and two descriptors.
REQUEST_BYTES = 1 << 17
# A process that holds one of these cannot be forked: NVIDIA's driver, its boards', WSL's and AMD's.
GPU_DEVICES = ("/dev/nvidia", "/dev/nvhost", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
# `python -u -m MODULE`.
RUN_MODULE = [sys.executable, "-u", "-m"]


class ForkServer:
    """Forks processes that run one module. Start it before the first thread: what a thread locks stays locked in its children."""

    def __init__(self, module: str):
        self._module, self._environment, self._requests = module, dict(os.environ), 0
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(FORK_SECONDS)
        adopt_orphans()
        self.pid = os.fork()
        if self.pid == 0:
            self._channel.close()
            _serve(theirs, module)
        theirs.close()

    def start(self, words: list[str], environment: dict[str, str], stdout: int, stderr: int) -> "Forked | None":
        """Start `python -u -m MODULE ...` as a child of this process; None where that must be executed instead."""
        if words[:4] != [*RUN_MODULE, self._module]:
            return None
        difference = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        self._requests += 1
        request = json.dumps([self._requests, words, difference]).encode()
        number, pid = 0, 0
        try:
            socket.send_fds(self._channel, [request], [stdout, stderr])
            while number < self._requests:
                number, pid = json.loads(self._channel.recv(64) or f"[{self._requests}, 0]")
        except OSError:
            # The request is too long, or the server is gone or stands still.
            self._channel.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        return Forked(pid) if pid else None


class Forked:
    """A child of this process, with what torchrun uses of subprocess.Popen."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that it was killed by; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # Somebody else has waited for it; subprocess takes that for 0 too.
                pid, status = self.pid, 0
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for its end."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code


class SpawnServer:
    """Spawns processes that run a module, as torch.multiprocessing does: nothing is shared, and each imports everything itself."""

    def __init__(self) -> None:
        resource_tracker.ensure_running()
        # Of the one process that multiprocessing keeps beside those that it spawns.
        self.pid: int = resource_tracker._resource_tracker._pid  # pyright: ignore

    def start(self, words: list[str], environment: dict[str, str], stdout: int, stderr: int) -> "Spawned | None":
        """Start `python -u -m MODULE ...` as a child of this process; None where that must be executed instead."""
        if words[:3] != RUN_MODULE:
            return None
        outputs = [str(Path(f"/proc/self/fd/{one}").readlink()) for one in (stdout, stderr)]
        process = multiprocessing.get_context("spawn").Process(target=_run_spawned, args=(words, environment, outputs), daemon=True)
        # Before anything else it would import this process's main module, and with it torch.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
        # torchrun ends a rank by its process group.
        while process.is_alive() and os.getpgid(process.pid or 0) != process.pid:
            time.sleep(0.001)
        return Spawned(process)


class Spawned:
    """A child that multiprocessing has started, with what torchrun uses of subprocess.Popen."""

    def __init__(self, process: BaseProcess):
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that it was killed by; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Wait for its end."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self._process.exitcode


def _run_spawned(words: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    os.setsid()
    for descriptor, path in enumerate(outputs, 1):
        # A pipe or a terminal is this process's own already.
        if path.startswith("/") and not path.startswith("/dev/"):
            with Path(path).open("a") as file:
                os.dup2(file.fileno(), descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore
    os.environ.clear()
    os.environ |= environment
    # As much as there is room for.
    set_title([*words[:4], f"(local rank {environment.get('LOCAL_RANK')})"])
    sys.argv = words[3:]
    with contextlib.ExitStack() as ending:
        # multiprocessing would print an error itself, and wait for all that the interpreter's end waits for.
        ending.push(_end_with_error)
        runpy.run_module(words[3], run_name="__main__", alter_sys=True)


def _end_with_error(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    if kind is not None and error is not None and not issubclass(kind, SystemExit):
        sys.excepthook(kind, error, trace)


def _serve(channel: socket.socket, module: str) -> None:
    """Import, then fork on request; what is forked runs the module, and leaves with its exit code."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # What is to stop ranks is not for this process; a rank gets what comes while it begins.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # The parent's pipes and locks.
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, 1 << 16)
    set_title([*RUN_MODULE, __name__])
    # An import that fails ends this process: what is executed instead will say why.
    for name in (module, *getattr(importlib.import_module(module), "PRELOAD", ())):
        importlib.import_module(name)
    del sys.modules[module]
    while True:
        request, descriptors = b"", list[int]()
        # The agent may end without having read an answer.
        with contextlib.suppress(OSError):
            request, descriptors, _, _ = socket.recv_fds(channel, REQUEST_BYTES, 2)
        if not request:
            os._exit(0)
        number, words, environment = json.loads(request)
        if _is_forkable() and _fork(channel, number):
            break
        # Whoever has a pid for this number needs no other answer.
        with contextlib.suppress(OSError):
            channel.send(json.dumps([number, 0]).encode())
        for one in descriptors:
            os.close(one)
    for descriptor, one in enumerate(descriptors, 1):
        os.dup2(one, descriptor)
        os.close(one)
    channel.close()
    os.environ |= environment
    set_title([*words, f"(local rank {environment.get('LOCAL_RANK')})"])
    sys.argv = words[3:]
    # Whole lines at once, nearly as under `-u`.
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def _is_forkable() -> bool:
    """Return True with one thread and no GPU in use: others would find locks that nobody opens, and a driver that fails."""
    opened = (os.path.realpath(one) for one in Path("/proc/self/fd").iterdir())
    return psutil.Process().num_threads() == 1 and not any(name.startswith(GPU_DEVICES) for name in opened)


def _fork(channel: socket.socket, number: int) -> bool:
    """Fork a process that the parent adopts, as the nearest subreaper, and which answers with its pid; returns True in it."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        os.setsid()
        while os.getppid() == between:
            time.sleep(0.001)
        # Itself, or nobody would know of it if the server were killed now.
        channel.send(json.dumps([number, os.getpid()]).encode())
        os.close(reader)
        os.close(writer)
        return True
    os.close(writer)
    # Until it has answered, or was killed.
    os.read(reader, 1)
    os.close(reader)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(between, 0)
    return False


def set_title(words: list[str]) -> None:
    """Show these words as this process's command line, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if end > start:
        title = b"\0".join(map(os.fsencode, words))
        ctypes.memmove(start, title[: end - start - 1].ljust(end - start, b"\0"), end - start)
