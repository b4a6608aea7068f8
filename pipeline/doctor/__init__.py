"""The doctor command: what would go wrong here, in under five seconds, and the line that cures it."""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from pipeline.config import Config, ConfigError, Dist, MachineError
from pipeline.doctor import network
from pipeline.doctor.network import Finding
from pipeline.files import Paths
from pipeline.hardware.machine import Machine, detect
from pipeline.hardware.network import PORT, split
from pipeline.hardware.placement import place
from pipeline.tracking.mirror_process import tracking_uri
from pipeline.tracking.receipt import CODE, git_state

LIMIT_SECONDS = 3.5
MIB, GIB = 1 << 20, 1 << 30
SHARED_BYTES, FREE_BYTES, RANK_BYTES = 256 * MIB, 2 * GIB, GIB
# The first that knows `attach: false`.
COMPOSE = (2, 20)


def run(config: Config, paths: Paths, leader: str | None = None) -> int:
    """Print one line for every thing looked at; 4 if one of them is wrong."""
    questions: dict[str, Callable[[], list[Finding]]] = {
        "GPUs": lambda: ranks(config, detect()),
        "memory": lambda: memory(config.dist, memory_limit()),
        "/dev/shm": lambda: [shared_memory(Path("/dev/shm"))],
        "disk": lambda: [disk(paths.runs)],
        "folders": lambda: folders(paths),
        "git": lambda: git(paths.root),
        "Docker Compose": lambda: [compose()],
        "this machine's name": lambda: [network.own_name(socket.gethostname())],
        f"port {PORT}": lambda: [network.port(PORT)],
        "MLflow": lambda: [network.mlflow(tracking_uri(paths))],
    }
    if leader is not None:
        host, port = split(leader)
        questions["leader"] = lambda: [network.leader(host, port)]
    until = time.monotonic() + LIMIT_SECONDS
    wrong = False
    for name, answer in [(name, network.ask(question)) for name, question in questions.items()]:
        try:
            findings = answer.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            findings = [Finding("wrong", f"{name}: no answer in time")]
        except (OSError, ValueError) as error:
            findings = [Finding("wrong", f"{name}: {error}")]
        for finding in findings:
            sys.stdout.write(f"{finding}\n")
            wrong |= finding.kind == "wrong"
    return MachineError.exit_code if wrong else 0


def ranks(config: Config, machine: Machine) -> list[Finding]:
    """Whether the ranks have what they compute on."""
    try:
        placement = place(config, machine)
    except (ConfigError, MachineError) as error:
        return [Finding("wrong", str(error))]
    dist, gpus = config.dist, len(machine.gpus)
    here = dist.world_size // dist.nodes
    how = f"{placement.backend}, {placement.precision}"
    if placement.device == "cpu":
        cores, threads = len(os.sched_getaffinity(0)), here * dist.threads_per_rank
        text = f"no GPU; {here} ranks with {threads} threads on {cores} cores ({how})"
        if threads > cores:
            return [Finding("note", f"{text}, which is slow", _fewer(dist, cores // dist.threads_per_rank))]
        return [Finding("ok", text)]
    text = f"{here} ranks on {gpus} GPUs, {machine.gpus[0]} ({how})"
    if gpus < here and dist.backend == "auto":
        return [Finding("wrong", f"{text}: ranks that share a GPU through gloo are slow", _fewer(dist, gpus))]
    return [Finding("ok", text)]


def _fewer(dist: Dist, most: int) -> str:
    """The largest world size with so many ranks a machine that leaves the global batch, and so the experiment, as it is."""
    sizes = range(dist.nodes * max(most, 1), 0, -dist.nodes)
    size = next(size for size in sizes if dist.global_batch % (size * dist.accumulation) == 0)
    batch = dist.global_batch // (size * dist.accumulation)
    own = ", lanes_per_rank: null" if dist.lanes_per_rank else ""
    return f"set dist.world_size: {size}, batch_size_per_gpu: {batch}{own}"


def memory(dist: Dist, limit_bytes: int | None) -> list[Finding]:
    """Nothing, unless a control group leaves little to a rank."""
    here = dist.world_size // dist.nodes
    if limit_bytes is None or limit_bytes >= here * RANK_BYTES:
        return []
    text = f"a control group allows {limit_bytes // MIB} MiB of memory to {here} ranks"
    return [Finding("note", text, f"MEMORY={2 * here}g docker compose up, or docker run --memory={2 * here}g")]


def memory_limit(mounted: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The lowest limit of this process's control group and those above it, of version 2 or 1."""
    limits: list[int] = []
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = mounted / "memory" if controllers else mounted
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        for group in (Path(path), *Path(path).parents):
            # No such file in a container, which sees its own group as the topmost; "max" where there is no limit.
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((files / group.relative_to("/") / name).read_text()))
    return min(limits, default=None)


def shared_memory(folder: Path) -> Finding:
    """Whether ranks and nccl can share memory; where they cannot, they die with "Bus error"."""
    size_bytes = shutil.disk_usage(folder).total if folder.is_dir() else 0
    text = f"{folder} has {size_bytes // MIB} MiB"
    if size_bytes >= SHARED_BYTES:
        return Finding("ok", text)
    return Finding("wrong", f"{text}, and ranks need {SHARED_BYTES // MIB}", "shm_size: 1gb in Compose, or docker run --shm-size=1g")


def disk(runs: Path, needed_bytes: int = FREE_BYTES) -> Finding:
    """Whether there is room for checkpoints."""
    there = next(path for path in (runs, *runs.parents) if path.is_dir())
    free_bytes = shutil.disk_usage(there).free
    text = f"{free_bytes / GIB:.1f} GiB free for {runs}"
    if free_bytes >= needed_bytes:
        return Finding("ok", text)
    cure = f"see what can go with du -sh {shlex.quote(str(there))}/* | sort -h"
    return Finding("wrong", f"{text}, and a training needs {needed_bytes / GIB:.1f}", cure)


def folders(paths: Paths) -> list[Finding]:
    """Whether this user may write where a run does, and what of root's lies in the way."""
    names = ("runs", "data", "data/raw", "data/prepared", "models", "metrics", "plots", "mlartifacts", ".dvc")
    all_of_them = dict.fromkeys(folder / name for folder in (paths.home, paths.root) for name in ("", *names))
    there = [folder for folder in all_of_them if folder.is_dir()]
    closed: dict[tuple[int, int], list[Path]] = {}
    for folder in there:
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            closed.setdefault((folder.stat().st_uid, folder.stat().st_gid), []).append(folder)
    found = [_closed(owner, some) for owner, some in closed.items()]
    owner = paths.home.stat()
    strange = _of_root(paths.home) if owner.st_uid else []
    if strange:
        some = f"{strange[0]} and {len(strange) - 1} more are" if len(strange) > 1 else f"{strange[0]} is"
        cure = _chown(owner.st_uid, owner.st_gid, [paths.home])
        found.append(Finding("note", f"{some} root's in a folder of uid {owner.st_uid}", cure))
    return found or [Finding("ok", f"uid {os.geteuid()} may write all folders of runs in {paths.root}")]


def _closed(owner: tuple[int, int], some: list[Path]) -> Finding:
    """Folders of one owner that this user may not write."""
    uid, gid = owner
    names = " ".join(shlex.quote(str(path)) for path in some)
    if os.statvfs(some[0]).f_flag & os.ST_RDONLY:
        return Finding("wrong", f"{names} cannot be written: it is mounted read-only", "mount it without :ro")
    text = f"{names} cannot be written: the owner is {uid}:{gid}, this is uid {os.geteuid()}"
    if uid == os.geteuid():
        return Finding("wrong", text, f"chmod u+rwx {names}")
    if uid and _in_container():
        # Not without env: in bash UID is read-only.
        return Finding("wrong", text, f"env UID={uid} GID={gid} docker compose up")
    return Finding("wrong", text, _chown(os.geteuid(), os.getegid(), some))


def _chown(uid: int, gid: int, some: list[Path]) -> str:
    if _in_container():
        return f"on the host, in the folder that is mounted: sudo chown -R {uid}:{gid} ."
    return f"sudo chown -R {uid}:{gid} " + " ".join(shlex.quote(str(path)) for path in some)


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def _of_root(folder: Path, levels: int = 2) -> list[Path]:
    """What of root's lies in a folder, so many levels deep and among the first 1,000 entries of each."""
    found: list[Path] = []
    if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
        return found
    for entry in islice(folder.iterdir(), 1000):
        # A file may go while we look.
        with contextlib.suppress(FileNotFoundError):
            if entry.lstat().st_uid == 0:
                found.append(entry)
            elif levels > 1 and entry.is_dir() and not entry.is_symlink():
                found += _of_root(entry, levels - 1)
    return found


def git(root: Path) -> list[Finding]:
    """Whether git trusts the folder, and whether receipts will name a commit."""
    found: list[Finding] = []
    for folder in dict.fromkeys((root, CODE)):
        _, _, errors = _said("git", "-C", str(folder), "rev-parse", "HEAD")
        cure = re.search(r"git config --global --add safe\.directory .+", errors)
        if cure:
            found.append(Finding("wrong", f"git does not trust {folder}, which is another user's", cure[0]))
    commit = git_state()["commit"]
    if commit:
        return [*found, Finding("ok", f"receipts will name commit {commit[:12]}")]
    return found or [Finding("note", "no commit to be had from git or LOCKSTEP_COMMIT; receipts will name none")]


def compose(needed: tuple[int, int] = COMPOSE) -> Finding:
    """Whether Docker Compose is new enough for our files."""
    if shutil.which("docker") is None:
        return Finding("note", "no docker here, nor is it needed without containers")
    code, said, _ = _said("docker", "compose", "version", "--short")
    version = re.match(r"v?(\d+)\.(\d+)", said)
    least = ".".join(map(str, needed))
    cure = "install it from https://docs.docker.com/compose/install/linux"
    if code or version is None:
        return Finding("wrong", f"docker has no Compose, and our files need {least}", cure)
    if (int(version[1]), int(version[2])) < needed:
        return Finding("wrong", f"Docker Compose {version[0]} is older than {least}, which our files need", cure)
    return Finding("ok", f"Docker Compose {version[0]}")


def _said(*words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a program; 127 if it is not there."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=2, env=os.environ | {"LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    except OSError:
        return 127, "", ""
    return ended.returncode, ended.stdout, ended.stderr
