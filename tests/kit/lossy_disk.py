"""A disk that keeps only what was synced: it records what a process does to a folder and lists every state that a power cut could leave.

The rules are those of ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014), with nothing granted that POSIX does not:
a file's bytes are certain after fsync of the file; until then they may be missing, zero, cut or have a hole (one file at a time). A name is
certain after fsync of the folder that holds it; until then each creation, rename and removal may be lost on its own, whatever came before
or after it.
"""

import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

# Before each of these the recorder looks at the folder, so that no two of them fall between two looks.
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
ROOT = 0
# Of so many changes every subset is tried.
ANY = 5

# A file's bytes and a folder's names, both by number; numbers are never given twice, as those of inodes are.
Names = dict[str, int]


@dataclass(frozen=True)
class Renaming:
    """One change of one folder, which happens as a whole or not at all: names that go (None) and names that come."""

    folder: int
    names: dict[str, int | None]


@dataclass(frozen=True)
class Writing:
    """New content of a file."""

    file: int
    content: bytes


@dataclass(frozen=True)
class Syncing:
    """An fsync that has returned, of a file or a folder."""

    number: int


@dataclass(frozen=True)
class Note:
    """Something that the recorded process holds for certain from here on, such as the step of a save that has returned."""

    value: int


@dataclass(frozen=True)
class CrashState:
    """What a power cut could leave: content by path, None for a folder; and the last note before the cut."""

    tree: frozenset[tuple[str, bytes | None]]
    note: int

    def write_to(self, folder: Path) -> None:
        for path, content in sorted(self.tree, key=lambda entry: entry[0]):
            if content is None:
                (folder / path).mkdir(parents=True)
            else:
                (folder / path).write_bytes(content)


@dataclass
class _Disk:
    """What is certain, and what may be lost."""

    is_folder: set[int]
    folders: dict[int, Names] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)
    renamings: list[Renaming] = field(default_factory=list)
    writings: dict[int, list[bytes]] = field(default_factory=dict)

    def apply(self, change: Renaming | Writing | Syncing) -> None:
        if isinstance(change, Renaming):
            self.renamings.append(change)
        elif isinstance(change, Writing):
            self.writings.setdefault(change.file, []).append(change.content)
        elif change.number in self.is_folder:
            for renaming in [one for one in self.renamings if one.folder == change.number]:
                _rename(self.folders, renaming)
                self.renamings.remove(renaming)
        elif change.number in self.writings:
            self.files[change.number] = self.writings.pop(change.number)[-1]

    def states(self) -> Iterator[frozenset[tuple[str, bytes | None]]]:
        for kept in _choices(len(self.renamings)):
            folders = {number: dict(names) for number, names in self.folders.items()}
            for renaming in itertools.compress(self.renamings, kept):
                _rename(folders, renaming)
            paths = dict(self._walk(folders, ROOT, ""))
            unsure = sorted({number for number in paths.values() if number in self.writings})
            for content in self._contents(unsure):
                yield frozenset((path, None if number in self.is_folder else content.get(number, b"")) for path, number in paths.items())

    def _contents(self, unsure: list[int]) -> Iterator[dict[int, bytes]]:
        """Every file as it was synced or as it was written last, and of these one at a time torn in every way."""
        ends = [(self.files.get(number, b""), self.writings[number][-1]) for number in unsure]
        for written in _choices(len(unsure)):
            whole = [end[at] for end, at in zip(ends, written, strict=True)]
            contents = self.files | dict(zip(unsure, whole, strict=True))
            yield contents
            for number in unsure:
                yield from (contents | {number: torn} for torn in self._torn(number))

    def _walk(self, folders: dict[int, Names], folder: int, prefix: str) -> Iterator[tuple[str, int]]:
        for name, number in folders.get(folder, {}).items():
            yield prefix + name, number
            if name.startswith(".") and number in self.is_folder:
                # A scratch folder: nobody looks into it.
                continue
            yield from self._walk(folders, number, f"{prefix}{name}/")

    def _torn(self, number: int) -> set[bytes]:
        synced, written = self.files.get(number, b""), self.writings[number]
        newest = written[-1]
        # What was never rewritten is not at risk.
        sure = len(os.path.commonprefix([synced, *written]))
        half = sure + (len(newest) - sure) // 2
        hole = newest[:sure] + bytes(half - sure) + newest[half:]
        return {*written, newest[:half], newest[:sure] + bytes(len(newest) - sure), hole}


def _choices(count: int) -> Iterator[tuple[bool, ...]]:
    """What may have reached the disk of so many changes: any of them; of more than five, the first ones, and all or none but two."""
    if count <= ANY:
        yield from itertools.product([False, True], repeat=count)
        return
    numbers = range(count)
    yield from (tuple(one < first for one in numbers) for first in range(count + 1))
    for two in itertools.combinations_with_replacement(numbers, 2):
        yield tuple(one in two for one in numbers)
        yield tuple(one not in two for one in numbers)


def _rename(folders: dict[int, Names], renaming: Renaming) -> None:
    names = folders.setdefault(renaming.folder, {})
    for name, number in renaming.names.items():
        if number is None:
            names.pop(name, None)
        else:
            names[name] = number


class Recording:
    """Records what this process does to a folder while it is entered; the folder must be empty or be given as certain by `settle`."""

    _entered: "list[Recording]" = []
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
        disk, note = _Disk(is_folder=self._seen_folders), -1
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
