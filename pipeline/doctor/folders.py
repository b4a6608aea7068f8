"""Checks of the disk: room for checkpoints, what its file system can do, and folders that this user can write."""

import contextlib
import errno
import fcntl
import os
import shlex
import shutil
import tempfile
from itertools import islice
from pathlib import Path

from pipeline.doctor.finding import Finding
from pipeline.files import Paths, fsync_path

GIB = 1 << 30
FREE_BYTES = 2 * GIB


def disk(runs: Path, needed_bytes: int = FREE_BYTES) -> Finding:
    """Whether there is room for checkpoints."""
    existing = next(path for path in (runs, *runs.parents) if path.is_dir())
    free_bytes = shutil.disk_usage(existing).free
    text = f"{free_bytes / GIB:.1f} GiB free for {runs}"
    if free_bytes >= needed_bytes:
        return Finding("ok", text)
    fix = f"list what takes the room with du -sh {shlex.quote(str(existing))}/* | sort -h"
    return Finding("wrong", f"{text}, and a training needs {needed_bytes / GIB:.1f}", fix)


def file_system(runs: Path) -> list[Finding]:
    """Whether files can be replaced at once, locked and synced where runs are: a bucket that is mounted as a folder can do little of it."""
    existing = next(path for path in (runs, *runs.parents) if path.is_dir())
    if not os.access(existing, os.W_OK):
        # The check of folders says so.
        return []
    doing = "make a folder"
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".doctor-") as folder:
            before, after = Path(folder) / "before", Path(folder) / "after"
            after.write_bytes(b"old")
            doing = "lock a file"
            with before.open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(b"new")
                file.flush()
                doing = "sync a file"
                os.fsync(file.fileno())
            doing = "replace a file"
            os.replace(before, after)
            if after.read_bytes() != b"new" or before.exists():
                raise OSError("the old file is still there")
            doing = "sync a folder"
            fsync_path(Path(folder))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # The check of the disk says so.
            return []
        fix = "put the experiment on a disk or NFS, and a copy of its runs in the bucket: LOCKSTEP_COPY=s3://BUCKET"
        return [Finding("wrong", f"{existing}: its file system cannot {doing} ({error.strerror or error}), as checkpoints need", fix)]
    return [Finding("ok", f"{existing}: files can be locked, replaced at once and synced")]


def permissions(paths: Paths) -> list[Finding]:
    """Whether this user can write all folders of a run, and whether root owns files among another user's."""
    names = ("", "runs", "data", "data/raw", "data/prepared", "models", "metrics", "plots", "mlartifacts", ".dvc")
    existing = [folder for folder in dict.fromkeys(top / name for top in (paths.home, paths.root) for name in names) if folder.is_dir()]
    unwritable: dict[tuple[int, int], list[Path]] = {}
    for folder in existing:
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            unwritable.setdefault((folder.stat().st_uid, folder.stat().st_gid), []).append(folder)
    findings = [_unwritable(owner, some) for owner, some in unwritable.items()]
    owner = paths.home.stat()
    of_root = _owned_by_root(paths.home) if owner.st_uid else []
    if of_root:
        text = f"{of_root[0]} and {len(of_root) - 1} more belong" if len(of_root) > 1 else f"{of_root[0]} belongs"
        fix = _chown(owner.st_uid, owner.st_gid, [paths.home])
        findings.append(Finding("note", f"{text} to root, in a folder of uid {owner.st_uid}", fix))
    return findings or [Finding("ok", f"uid {os.geteuid()} can write all folders of runs in {paths.root}")]


def _unwritable(owner: tuple[int, int], some: list[Path]) -> Finding:
    """Some folders of one owner that this user cannot write."""
    uid, gid = owner
    names = " ".join(shlex.quote(str(path)) for path in some)
    if os.statvfs(some[0]).f_flag & os.ST_RDONLY:
        return Finding("wrong", f"{names} cannot be written: it is mounted read-only", "mount it without :ro")
    text = f"{names} cannot be written: the owner is {uid}:{gid}, this is uid {os.geteuid()}"
    if uid == os.geteuid():
        return Finding("wrong", text, f"chmod u+rwx {names}")
    if uid and _in_container():
        # bash does not let a command set UID, env does.
        return Finding("wrong", text, f"env UID={uid} GID={gid} docker compose up")
    return Finding("wrong", text, _chown(os.geteuid(), os.getegid(), some))


def _chown(uid: int, gid: int, some: list[Path]) -> str:
    if _in_container():
        return f"on the host, in the folder that is mounted: sudo chown -R {uid}:{gid} ."
    return f"sudo chown -R {uid}:{gid} " + " ".join(shlex.quote(str(path)) for path in some)


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def _owned_by_root(folder: Path, levels: int = 2) -> list[Path]:
    """Return root's files in a folder, looking `levels` deep and at the first 1,000 entries of each folder."""
    found: list[Path] = []
    if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
        return found
    for entry in islice(folder.iterdir(), 1000):
        # A file may be deleted while we look.
        with contextlib.suppress(FileNotFoundError):
            if entry.lstat().st_uid == 0:
                found.append(entry)
            elif levels > 1 and entry.is_dir() and not entry.is_symlink():
                found += _owned_by_root(entry, levels - 1)
    return found
