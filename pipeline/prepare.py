"""The prepare stage: a data set, found, checked, split and packed."""

import hashlib
import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import data
from pipeline.config import Config, DataError, draw_seed
from pipeline.data import Raw, Split, picked, store
from pipeline.data.image_files import told
from pipeline.files import Paths, locked, make_folder

log = logging.getLogger(__name__)

# More classes are not listed.
MOST_NAMES = 12


def run(config: Config, paths: Paths, folder: Path | None = None) -> int:
    """Write the packed store, by default where the stages look for it; nothing is left half-written."""
    target = folder or paths.prepared
    make_folder(target.parent)
    with locked(target.parent):
        manifest = packed(config, paths, target)
    counts = ", ".join(f"{count} {name}" for name, count in manifest.counts.items())
    named = f" ({', '.join(manifest.class_names)})" if manifest.num_classes <= MOST_NAMES else ""
    shape = "x".join(map(str, manifest.shape))
    log.info("prepared %s: %s images of %s in %d classes%s", config.data.name, counts, shape, manifest.num_classes, named)
    if imbalance := imbalance_of(manifest):
        log.info("%s; train.class_weights: balanced makes all classes count alike in the loss", imbalance)
    return 0


def packed(config: Config, paths: Paths, target: Path) -> store.Manifest:
    """Find the data set, split it and pack it."""
    source = paths.root / config.data.root if config.data.root else None
    argument = config.data.name.partition(":")[2] or None
    request = data.Request(
        source, paths.downloads, config.seed, argument, "", config.data.image_size, target.parent, paths.root, config.data.allow_broken
    )
    raw = data.load(config.data.name, request)
    if raw.left_out:
        log.warning("%s; left out, as data.allow_broken is %d", told(raw.left_out), config.data.allow_broken)
    source_sha256 = None if raw.depends_on_seed else raw.source_sha256 or _sha256(raw)
    train, validation = (raw.train, raw.validation) if raw.validation else _hold_out(raw.train, config.data.validation_share, config.seed)
    splits = {"train": train, "validation": validation, "test": raw.test}
    side = config.data.image_size
    if side is not None and any(split.images.shape[-2:] != (side, side) for split in splits.values()):
        splits = {name: Split(resize(split.images, side), split.labels) for name, split in splits.items()}
    manifest = store.write(target, store.made_for(config), splits, raw.class_names, source_sha256, raw.left_out)
    raw.packed()
    return manifest


def imbalance_of(manifest: store.Manifest) -> str | None:
    """Say how many training images the smallest and the largest class have, if one has more than twice as many as another."""
    of_train = dict(zip(manifest.class_names, manifest.class_counts["train"], strict=True))
    least, most = min(of_train, key=of_train.__getitem__), max(of_train, key=of_train.__getitem__)
    if of_train[most] <= 2 * of_train[least]:
        return None
    return f"the classes have from {of_train[least]} ({least}) to {of_train[most]} ({most}) training images"


def _sha256(raw: Raw) -> str:
    """One SHA-256 over all images and labels of a source, whose shapes are in the manifest."""
    found = hashlib.sha256()
    for split in (raw.train, raw.test, *([raw.validation] if raw.validation else [])):
        for array in split:
            for piece in store.pieces(array):
                found.update(piece.data)
    return found.hexdigest()


def _hold_out(split: Split, share: float, seed: int) -> tuple[Split, Split]:
    """The training images without a share of them, and that share; both in their first order."""
    count = len(split.labels)
    held = round(count * share)
    if held == 0:
        raise DataError(f"data.validation_share: {share} of {count} training images is none")
    shuffled = np.random.Generator(np.random.PCG64(draw_seed(seed, "validation"))).permutation(count)
    return picked(split, np.sort(shuffled[held:])), picked(split, np.sort(shuffled[:held]))


def resize(images: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Images of side x side pixels, antialiased, a thousand at a time."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    pieces = [
        F.interpolate(torch.from_numpy(images[start : start + 1000]).float(), (side, side), mode="bilinear", antialias=True)
        .round_()
        .clamp_(0, 255)
        .to(torch.uint8)
        for start in range(0, len(images), 1000)
    ]
    return torch.cat(pieces).numpy()
