"""A disk that keeps only what was synced: every state that a power cut could leave of the changes that were made to it.

The rules are those of ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014), with nothing granted that POSIX does not:
a file's bytes are certain after fsync of the file; until then they may be missing, zero, cut or have a hole (one file at a time). A name is
certain after fsync of the folder that holds it; until then each creation, rename and removal may be lost on its own, whatever came before
or after it.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
class Disk:
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
                rename(self.folders, renaming)
                self.renamings.remove(renaming)
        elif change.number in self.writings:
            self.files[change.number] = self.writings.pop(change.number)[-1]

    def states(self) -> Iterator[frozenset[tuple[str, bytes | None]]]:
        for kept in choices(len(self.renamings)):
            folders = {number: dict(names) for number, names in self.folders.items()}
            for renaming in itertools.compress(self.renamings, kept):
                rename(folders, renaming)
            paths = dict(self._walk(folders, ROOT, ""))
            unsure = sorted({number for number in paths.values() if number in self.writings})
            for content in self._contents(unsure):
                yield frozenset((path, None if number in self.is_folder else content.get(number, b"")) for path, number in paths.items())

    def _contents(self, unsure: list[int]) -> Iterator[dict[int, bytes]]:
        """Every file as it was synced or as it was written last, and of these one at a time torn in every way."""
        ends = [(self.files.get(number, b""), self.writings[number][-1]) for number in unsure]
        for written in choices(len(unsure)):
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
        sure = len(os.path.commonprefix([synced, *written]))  # noqa: RUF071
        half = sure + (len(newest) - sure) // 2
        hole = newest[:sure] + bytes(half - sure) + newest[half:]
        return {*written, newest[:half], newest[:sure] + bytes(len(newest) - sure), hole}


def choices(count: int) -> Iterator[tuple[bool, ...]]:
    """What may have reached the disk of so many changes: any of them; of more than five, the first ones, and all or none but two."""
    if count <= ANY:
        yield from itertools.product([False, True], repeat=count)
        return
    numbers = range(count)
    yield from (tuple(one < first for one in numbers) for first in range(count + 1))
    for two in itertools.combinations_with_replacement(numbers, 2):
        yield tuple(one in two for one in numbers)
        yield tuple(one not in two for one in numbers)


def rename(folders: dict[int, Names], renaming: Renaming) -> None:
    names = folders.setdefault(renaming.folder, {})
    for name, number in renaming.names.items():
        if number is None:
            names.pop(name, None)
        else:
            names[name] = number
