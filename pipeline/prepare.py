"""The prepare stage: a data set, found, checked, split and packed."""

import hashlib
import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import data
from pipeline.config import Config, DataError, draw_seed
from pipeline.data import Raw, Split, store
from pipeline.files import Paths

log = logging.getLogger(__name__)


def run(config: Config, paths: Paths, folder: Path | None = None) -> int:
    """Write the packed store, by default where the stages look for it; nothing is left half-written."""
    source = paths.root / config.data.root if config.data.root else None
    argument = config.data.name.partition(":")[2] or None
    raw = data.load(config.data.name, data.Request(source, paths.downloads, config.seed, argument))
    source_sha256 = None if raw.depends_on_seed else _sha256(raw)
    train, validation = _hold_out(raw.train, config.data.validation_share, config.seed)
    splits = {"train": train, "validation": validation, "test": raw.test}
    if config.data.image_size is not None:
        splits = {name: Split(resize(split.images, config.data.image_size), split.labels) for name, split in splits.items()}
    manifest = store.write(folder or paths.prepared, store.made_for(config), splits, raw.class_names, source_sha256)
    counts = ", ".join(f"{count} {name}" for name, count in manifest.counts.items())
    log.info(
        "prepared %s: %s images of %s in %d classes", config.data.name, counts, "x".join(map(str, manifest.shape)), manifest.num_classes
    )
    return 0


def _sha256(raw: Raw) -> str:
    """One SHA-256 over all images and labels of a source, whose shapes are in the manifest."""
    found = hashlib.sha256()
    for split in (raw.train, raw.test):
        for array in split:
            found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def _hold_out(split: Split, share: float, seed: int) -> tuple[Split, Split]:
    """The training images without a share of them, and that share; both in their first order."""
    count = len(split.labels)
    held = round(count * share)
    if held == 0:
        raise DataError(f"data.validation_share: {share} of {count} training images is none")
    shuffled = np.random.Generator(np.random.PCG64(draw_seed(seed, "validation"))).permutation(count)
    kept, out = np.sort(shuffled[held:]), np.sort(shuffled[:held])
    return Split(split.images[kept], split.labels[kept]), Split(split.images[out], split.labels[out])


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
