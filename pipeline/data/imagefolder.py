"""Images in a folder for each class: `train/`, and `val/` and `test/` where they are there; decoded, cut to a square and resized."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.config import ConfigError, DataError, draw_seed
from pipeline.data import Raw, Request, Split, picked
from pipeline.data import files_of as files_in
from pipeline.data.decoding import Decoded
from pipeline.data.image_files import TEST, TRAIN, VALIDATION, Files, class_folders, files_of, one_of
from pipeline.data.store import pieces

# Of the images of a folder without train/, for the test.
HELD_OUT = 0.1


def load(request: Request) -> Raw:
    """The images in data.root, as squares of data.image_size pixels; raises DataError for what cannot be one."""
    root, side = request.root, request.image_size
    if request.argument is not None:
        raise ConfigError(f"data.name: imagefolder:{request.argument}: the first images would be of one class; make a smaller folder")
    if root is None or side is None:
        raise ConfigError(f"data.{'root' if root is None else 'image_size'}: imagefolder needs it; set it beside data.name")
    if not root.is_dir():
        raise DataError(f"data.root: {root} is not a folder; name one with a folder for each class, or with train/ and test/")
    is_flat = not (root / TRAIN).is_dir()
    if is_flat:
        classes = class_folders(root)
        found = {"all": files_of(root, root, classes)}
    else:
        classes, found = splits(root)
    decoded = Decoded(request.scratch or request.downloads.parent, root, side, found, request.allow_broken)
    read = {name: decoded.split(name) for name in found}
    if is_flat:
        raw = _parted(root, classes, read["all"], request.seed)
    else:
        raw = Raw(read["train"], read["test"], classes, read.get("validation"))
    return replace(raw, left_out=decoded.left_out, packed=decoded.discard)


def splits(root: Path) -> tuple[list[str], dict[str, Files]]:
    """The classes, and the files of every split that has a folder; ImageNet's val is what people test on."""
    classes = class_folders(root / TRAIN)
    found = {"train": files_of(root / TRAIN, root, classes)}
    validation, test = one_of(root, VALIDATION), one_of(root, TEST)
    if test is None:
        validation, test = None, validation
    if test is None:
        raise DataError(f"{root}: has train/ and neither test/ nor val/; make one of them, or put the folders of the classes here")
    for name, folder in (("validation", validation), ("test", test)):
        if folder is not None:
            strangers = sorted(set(class_folders(folder)) - set(classes))
            if strangers:
                raise DataError(f"{folder}: {strangers[0]} is no class of {root / TRAIN}; it has {', '.join(classes[:9])}")
            found[name] = files_of(folder, root, classes, may_lack=True)
    return classes, found


def _parted(root: Path, classes: list[str], whole: Split, seed: int) -> Raw:
    """About a tenth of each class, at least one, is held out by seed and name for the test; the source is the same for every seed.

    So what has been trained on is not tested on when more images are there.
    """
    paths = files_in(whole.images)
    assert paths is not None
    own_seed = draw_seed(seed, "imagefolder")
    drawn = np.array([_drawn(own_seed, os.fsencode(path.relative_to(root))) for path in paths])
    held = drawn < HELD_OUT
    for label, name in enumerate(classes):
        own = np.flatnonzero(whole.labels == label)
        if len(own) < 2:
            raise DataError(f"{root / name}: one image cannot be both trained on and tested; add some, or make train/ and test/")
        if held[own].all() or not held[own].any():
            held[own] = False
            held[own[drawn[own].argmin()]] = True
    sha256 = hashlib.sha256()
    for array in whole:
        for piece in pieces(array):
            sha256.update(piece.data)
    train, test = (picked(whole, np.flatnonzero(one)) for one in (~held, held))
    return Raw(train, test, classes, source_sha256=sha256.hexdigest())


def _drawn(seed: int, name: bytes) -> float:
    """A number from 0 to 1 for a file."""
    return int.from_bytes(hashlib.sha256(b"%d %s" % (seed, name)).digest()[:6]) / 2**48
