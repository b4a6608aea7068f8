"""One image file as a square of uint8."""

import errno
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.pictures import FORMATS, UNREADABLE, square

SMALLEST, LARGEST_PIXELS = 2, 100_000_000


def decode(source: Path | BytesIO, side: int, name: str) -> NDArray[np.uint8] | str:
    """Return an image as [3, side, side], upright, its middle cut to a square; or in one line why there is none."""
    try:
        with Image.open(source, formats=FORMATS) as file:
            if min(file.size) < SMALLEST or file.width * file.height > LARGEST_PIXELS:
                limits = f"{SMALLEST} a side and {LARGEST_PIXELS:,} in all are the limits"
                return f"{name}: has {file.width} x {file.height} pixels; {limits}"
            found = square(file, side)
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.ELOOP):
            # The disk's or the system's, and no matter of the image.
            raise
        return f"{name}: cannot be decoded ({(str(error).splitlines() or [type(error).__name__])[0]})"
    return np.ascontiguousarray(np.asarray(found).transpose(2, 0, 1))
