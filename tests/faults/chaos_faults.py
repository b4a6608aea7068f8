"""Faults for the campaign: what is done to the processes of a start, to its disk, and to the files that it left."""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.kit.experiment import clean_environment

MARK = "LOCKSTEP_CHAOS"
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
WORDS = {
    "torchrun": "pipeline.launch.agent",
    "fork-server": "pipeline.forkserver",
    "rank": "pipeline.training.train_rank",
    "mirror": "pipeline.tracking.mirror",
}
# Whom which signal is sent to, all at once.
SENT: dict[str, tuple[tuple[str, signal.Signals], ...]] = {
    "rank-kill": (("rank", KILL),),
    "mirror-kill": (("mirror", KILL),),
    "fork-server-kill": (("fork-server", KILL),),
    "torchrun-kill": (("torchrun", KILL),),
    "launcher-kill": (("launcher", KILL),),
    "launcher-torchrun-kill": (("launcher", KILL), ("torchrun", KILL)),
    "launcher-term": (("launcher", TERM),),
    "launcher-int": (("launcher", INT),),
    "torchrun-term": (("torchrun", TERM),),
    "torchrun-int": (("torchrun", INT),),
    "rank-term": (("rank", TERM),),
    "rank-int": (("rank", INT),),
}
# What a start goes on after, and what ends it.
PASSING = ("rank-kill", "rank-kill", "rank-pause", "mirror-kill", "fork-server-kill")
ENDING = (*(kind for kind in SENT if kind not in PASSING), "two-signals", "power-cut", "power-cut", "disk-full", "disk-full")
FILES = ("newest", "best", "index", "status", "mirror")
BETWEEN = (*(f"{file}-{how}" for file in FILES for how in ("cut", "flip")), "journal-cut", "journal-cut", "newest-gone", "partial")
# Where nothing needs the checkpoints any more.
AFTER_THE_END = ("journal-cut", "status-cut", "mirror-cut", "mirror-flip", "partial")
# A start that has so many steps before it cannot end by itself before a signal is heard.
FAR_FROM_THE_END = 25
LAUNCHER_DIES = {"launcher-kill", "launcher-torchrun-kill", "power-cut"}
EXITS = {
    **{kind: {75} for kind in SENT if not kind.endswith("-kill")},
    "torchrun-kill": {75, 6},
    # The second one comes at once, as a machine's, or seconds later, as a person's.
    "two-signals": {75, 130},
    "disk-full": {4},
}


@dataclass(frozen=True)
class Fault:
    """What, when, and two numbers from 0 to 1: how far into that, and which rank, byte or bit."""

    kind: str
    when: str
    far: float
    which: float

    def __str__(self) -> str:
        return f"{self.kind} ({self.when} {self.far:.2f})"


@dataclass
class Start:
    """One `python -m pipeline train`, its processes known by a mark in their environment."""

    folder: Path
    run: Path
    number: int
    total_steps: int
    allowed: set[int] = field(default_factory=lambda: {0})
    died_at: float | None = None

    def __post_init__(self) -> None:
        self.first_step, self.began_at = step_of(self.run), time.monotonic()
        # The errors lie where the disk is never full.
        self.errors = self.folder.with_name(f"{self.folder.name}.stderr-{self.number}.log")
        command = ["python", "-m", "pipeline", "train", "--params", str(self.folder / "params.yaml")]
        with self.errors.open("w") as log:
            self.process = subprocess.Popen(
                command, env=clean_environment() | {MARK: self.mark}, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def mark(self) -> str:
        return f"{self.folder}:{self.number}"

    def victims(self, role: str) -> list[psutil.Process]:
        """The processes below the launcher that play a part, or the launcher."""
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            launcher = psutil.Process(self.process.pid)
            if role == "launcher":
                return [launcher] if self.process.poll() is None else []
            for one in launcher.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    words = one.cmdline()
                    if WORDS[role] in words and (role == "torchrun" or WORDS["torchrun"] not in words):
                        found.append(one)
        return sorted(found, key=lambda one: one.pid)

    def left(self) -> list[psutil.Process]:
        """All that lives of this start, whoever its parent is now."""
        found: list[psutil.Process] = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if one.environ().get(MARK) == self.mark and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def power_cut(self) -> None:
        """Everything at once."""
        while left := self.left():
            for one in left:
                with contextlib.suppress(psutil.Error):
                    one.kill()

    def wait_for(self, fault: Fault) -> bool:
        """Until it is time for a fault; False where the start has ended before."""
        begin = {
            "early": -1,
            "step": self.first_step + 1 + int(fault.far * (self.total_steps - self.first_step)),
            "last": self.total_steps - int(fault.far * 5),
            "publishing": self.total_steps,
        }[fault.when]
        while time.monotonic() - self.began_at < 150 and self.process.poll() is None:
            if (time.monotonic() - self.began_at > fault.far * 5) if begin < 0 else (step_of(self.run) >= begin):
                if fault.when == "publishing":
                    time.sleep(fault.far * 6)
                return self.process.poll() is None
            time.sleep(0.02)
        return False

    def inject(self, fault: Fault) -> bool:
        """Do it, as soon as whom it is for is there; whether it was done."""
        if not self.wait_for(fault):
            return False
        ranks_run = bool(self.victims("rank"))
        if fault.kind == "disk-full":
            fill(self.folder, max(0, int((fault.which - 0.5) * 65536)))
        elif fault.kind == "power-cut":
            self.power_cut()
        elif not self._send(fault):
            return False
        self.allowed |= EXITS.get(fault.kind, set())
        if 75 in EXITS.get(fault.kind, ()) and ranks_run and self.total_steps - step_of(self.run) > FAR_FROM_THE_END:
            # A signal that nobody hears would end as if it had not been sent.
            self.allowed.discard(0)
        if fault.kind in ("launcher-term", "launcher-int") and not ranks_run:
            self.allowed.add(143 if fault.kind == "launcher-term" else 130)
        if fault.kind in LAUNCHER_DIES:
            self.allowed, self.died_at = {-KILL}, time.monotonic()
        return True

    def _send(self, fault: Fault) -> bool:
        plan = SENT.get(fault.kind, (("rank" if fault.kind == "rank-pause" else "launcher", TERM),))
        while not all(victims := [self.victims(role) for role, _ in plan]):
            if self.process.poll() is not None or time.monotonic() - self.began_at > 150:
                return False
            time.sleep(0.01)
        chosen = [those[int(fault.which * len(those))] for those in victims]
        try:
            if fault.kind == "rank-pause":
                chosen[0].suspend()
                time.sleep(1 + fault.which)
                chosen[0].resume()
                return True
            for one, (_, number) in zip(chosen, plan, strict=True):
                one.send_signal(number)
            if fault.kind == "two-signals":
                time.sleep(fault.which * 4)
                if self.process.poll() is None:
                    chosen[0].send_signal(INT)
        except psutil.NoSuchProcess:
            return fault.kind == "two-signals"
        return True


def step_of(run: Path) -> int:
    """The newest step in a run's journal."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        tail = (run / "journal.jsonl").read_bytes()[-20000:]
        return max(int(line.split(b'"step": ')[1].split(b",")[0]) for line in tail.splitlines() if b'"kind": "metrics"' in line)
    return 0


def fill(folder: Path, free_bytes: int) -> None:
    """Leave so much room on a folder's disk."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * max(4096, os.statvfs(folder).f_bavail * 4096))
    if free_bytes:
        os.truncate(folder / "filler", (folder / "filler").stat().st_size - free_bytes)


def newest(run: Path, names: str) -> Path | None:
    """The newest checkpoint or best model on the disk."""
    return max((run / "checkpoints").glob(names), default=None)


def hurt(run: Path, fault: Fault, harmed: dict[Path, str]) -> str | None:
    """Damage a file that nothing uses now; what was done, or None where there is nothing to damage."""
    name, _, how = fault.kind.partition("-")
    if name == "partial":
        (run / "checkpoints").mkdir(exist_ok=True)
        (run / "checkpoints" / ".index.json.partial").write_bytes(random.Random(fault.far).randbytes(int(fault.which * 5000)))
        return fault.kind
    path = {"newest": newest(run, "step-*"), "best": newest(run, "best-*"), "index": run / "checkpoints" / "index.json"}.get(
        name, run / f"{name}.json{'l' if name == 'journal' else ''}"
    )
    if path is None or not path.exists() or not (content := path.read_bytes()):
        return None
    if how == "gone":
        path.unlink()
        harmed[path] = ""
        return f"{path.name} gone"
    lines = content.splitlines(keepends=True)
    if name == "journal" and len(lines) < 10:
        return None
    # Of the journal, any length inside the last lines; of others, any length, and any bit.
    least = len(content) - sum(map(len, lines[-6:])) if name == "journal" else 0
    at = least + int(fault.which * (len(content) - least))
    flipped = content[:at] + bytes([content[at] ^ (1 << int(fault.far * 8))]) + content[at + 1 :]
    path.write_bytes(content[:at] if how == "cut" else flipped)
    harmed[path] = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{path.name} {how} at {at} of {len(content)}"
