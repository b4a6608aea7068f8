"""The files of images in folders of classes: found, sorted, and refused where they would be left out in silence."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pipeline.config import DataError

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
TRAIN = "train"
VALIDATION, TEST = ("val", "validation", "valid"), ("test",)
# More files are counted, and not named.
MOST_NAMES = 9
# A folder with such a name is no class.
SPLITS = (TRAIN, "training", *VALIDATION, *TEST, "testing")


@dataclass(frozen=True)
class Files:
    """The images of a split, in an order that does not depend on the disk, and the class of each."""

    paths: list[Path]
    labels: list[int]


def one_of(root: Path, names: tuple[str, ...]) -> Path | None:
    """Return the folder that has one of these names, if there is one."""
    found = [root / name for name in names if (root / name).is_dir()]
    if len(found) > 1:
        raise DataError(f"{root}: has {found[0].name}/ and {found[1].name}/, which are the same split; remove one")
    return found[0] if found else None


def class_folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted; those that begin with a dot are none, and nothing else may be there."""
    names: list[str] = []
    for one in sorted(folder.iterdir()):
        if one.name.startswith("."):
            continue
        if one.is_symlink() or not one.is_dir():
            raise DataError(f"{shown(one)}: is not the folder of a class; move it out of {shown(folder)}")
        if shown(one.name) != one.name or not one.name.isprintable():
            raise DataError(f"{shown(one)}: the name of a class must be UTF-8 that can be printed; rename it")
        names.append(one.name)
    if not names:
        raise DataError(f"{folder}: has no folder; put the images of each class into one with its name")
    splits = [name for name in names if name.casefold() in SPLITS]
    if splits:
        raise DataError(f"{folder}: {splits[0]} is the name of a split and no class; splits are called train, val and test")
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(name.casefold(), name)) != name:
            raise DataError(f"{folder}: {other} and {name} differ in case alone; rename one of them")
    return names


def files_of(folder: Path, root: Path, classes: list[str], may_lack: bool = False) -> Files:
    """All images below the classes' folders; raises DataError for a file of another kind, and for a link that leaves the root."""
    paths: list[Path] = []
    labels: list[int] = []
    whole = root.resolve()
    for label, name in enumerate(classes):
        own = sorted(_files(folder / name), key=os.fsencode) if (folder / name).is_dir() else []
        if not own and not may_lack:
            raise DataError(f"{folder / name}: has no image; add some, or remove the folder")
        for path in own:
            if path.suffix.lower() not in ENDINGS:
                raise DataError(f"{shown(path)}: is no image by its name ({', '.join(ENDINGS)}); remove it from the data set")
            if path.is_symlink() and not path.resolve().is_relative_to(whole):
                raise DataError(f"{shown(path)}: links out of {root}; copy what it links to (with DVC: dvc config cache.type copy)")
            if path.exists() and not path.is_file():
                raise DataError(f"{shown(path)}: is no file that can be read; remove it from the data set")
        paths += own
        labels += [label] * len(own)
    return Files(paths, labels)


def _files(folder: Path) -> Iterator[Path]:
    for at, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [one for one in folders if not one.startswith(".")]
        for one in folders:
            if Path(at, one).is_symlink():
                raise DataError(f"{shown(Path(at, one))}: a link to a folder is not followed; put the images there")
        yield from (Path(at, name) for name in names if not name.startswith("."))


def _raise(error: OSError) -> NoReturn:
    raise error


def told(broken: list[str]) -> str:
    """Some broken files in one line: the first with what is wrong with it, and the names of some others."""
    names = [one.partition(": cannot be decoded")[0] for one in broken[1 : 1 + MOST_NAMES]]
    more = [f"{len(broken) - 1 - MOST_NAMES} more"] if len(broken) > 1 + MOST_NAMES else []
    return broken[0] + (f"; as well as {', '.join(names + more)}" if names else "")


def shown(name: Path | str) -> str:
    """A name in one line: bytes that are no UTF-8 and what cannot be printed with backslashes."""
    text = os.fsencode(name).decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
