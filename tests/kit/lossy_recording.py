"""Records what this process does to a folder, for a lossy disk to lose parts of it."""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from tests.kit.lossy_disk import ROOT, CrashState, Disk, Names, Note, Renaming, Syncing, Writing

# Before each of these the recorder looks at the folder, so that no two of them fall between two looks.
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


class Recording:
    """Records what this process does to a folder while it is entered; the folder must be empty or be given as certain by `settle`."""

    _entered: ClassVar[list["Recording"]] = []
    _hooked = False

    def __init__(self, root: Path, honours: Callable[[int], bool] = lambda mode: True):
        """`honours` says of a file's mode whether its fsync does anything: a disk that lies is the control of every test."""
        self._root, self._honours = root, honours
        self.changes: list[Renaming | Writing | Syncing | Note] = []
        self._numbers: dict[int, int] = {}
        self._next, self._certain = 1, 0
        self._folders: dict[int, Names] = {ROOT: {}}
        self._content: dict[int, bytes] = {}
        self._looking = False
        self._seen_folders: set[int] = {ROOT}

    def note(self, value: int) -> None:
        self._look()
        self.changes.append(Note(value))

    def settle(self) -> None:
        """Take what the folder holds now for certain."""
        self._look()
        self.changes += [Syncing(number) for number in (*self._folders, *self._content)]
        self._certain = len(self.changes)

    def crash_states(self) -> list[CrashState]:
        """Return each state once, with the last note after which a power cut could have left it."""
        found: dict[frozenset[tuple[str, bytes | None]], int] = {}
        disk, note = Disk(is_folder=self._seen_folders), -1
        for position, change in enumerate(self.changes):
            if isinstance(change, Note):
                note = change.value
            else:
                disk.apply(change)
            if position >= self._certain:
                found |= dict.fromkeys(disk.states(), note)
        return [CrashState(tree, note) for tree, note in found.items()]

    def __enter__(self) -> "Recording":
        if not Recording._hooked:
            # It stays for as long as the process lives.
            sys.addaudithook(_before)
            Recording._hooked = True
        self._fsync = os.fsync
        os.fsync = self._synced
        Recording._entered.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        Recording._entered.remove(self)
        os.fsync = self._fsync
        self._look()

    def _synced(self, file: int) -> None:
        self._look()
        self._fsync(file)
        found = os.fstat(file)
        if found.st_ino in self._numbers and self._honours(found.st_mode):
            self.changes.append(Syncing(self._numbers[found.st_ino]))

    def _look(self) -> None:
        """Note what has changed since the last look."""
        if self._looking:
            return
        self._looking = True
        try:
            self._numbers[self._root.stat().st_ino] = ROOT
            folders: dict[int, Names] = {}
            content: dict[int, bytes] = {}
            seen = {self._root.stat().st_ino}
            self._read(self._root, ROOT, folders, content, seen)
            # A number goes with its inode: the next file may be given the same one.
            self._numbers = {inode: number for inode, number in self._numbers.items() if inode in seen}
            self._compare(folders, content)
        finally:
            self._looking = False

    def _read(self, folder: Path, number: int, folders: dict[int, Names], content: dict[int, bytes], seen: set[int]) -> None:
        folders[number] = {}
        with os.scandir(folder) as entries:
            found = list(entries)
        for entry in found:
            inode = entry.inode()
            seen.add(inode)
            if inode not in self._numbers:
                self._numbers[inode] = self._next
                self._next += 1
            known = self._numbers[inode]
            folders[number][entry.name] = known
            if entry.is_dir(follow_symlinks=False):
                self._seen_folders.add(known)
                self._read(Path(entry.path), known, folders, content, seen)
            else:
                content[known] = Path(entry.path).read_bytes()

    def _compare(self, folders: dict[int, Names], content: dict[int, bytes]) -> None:
        for number in sorted(folders):
            before, now = self._folders.get(number, {}), folders[number]
            gone = {name: one for name, one in before.items() if name not in now}
            come = {name: one for name, one in now.items() if before.get(name) != one}
            for name, one in come.items():
                old = next((was for was, which in gone.items() if which == one), None)
                self.changes.append(Renaming(number, ({} if old is None else {old: None}) | {name: one}))
                gone.pop(old or "", None)
            self.changes += [Renaming(number, {name: None}) for name in gone]
        for number, value in content.items():
            if value != self._content.get(number, b""):
                self.changes.append(Writing(number, value))
        self._folders, self._content = folders, content


def _before(event: str, arguments: Any) -> None:
    if event in EVENTS:
        for one in Recording._entered:
            one._look()


def only_files(mode: int) -> bool:
    """A disk on which fsync of a folder does nothing."""
    return stat.S_ISREG(mode)


def only_folders(mode: int) -> bool:
    """A disk on which fsync of a file does nothing."""
    return stat.S_ISDIR(mode)
