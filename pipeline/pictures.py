"""A picture as a model sees it: upright, in RGB, its middle cut to a square. MLflow keeps this file beside a model."""

import struct

import numpy as np
from PIL import Image, ImageOps

ORIENTATION = 0x0112
# What a camera's orientation asks for.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What an image may be, whatever its name says: others have readers that start programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
# What PIL raises for what it cannot read.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    Image.DecompressionBombError,
)


def square(file: Image.Image, side: int) -> Image.Image:
    """Return an opened picture with so many pixels a side."""
    orientation = _orientation(file)
    # The middle of a turned image is the turned middle.
    found = ImageOps.fit(colours(file), (side, side), Image.Resampling.BICUBIC)
    return found.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else found


def _orientation(file: Image.Image) -> int:
    """What the camera noted; where that cannot be read, the image lies as it lies."""
    try:
        found = file.getexif().get(ORIENTATION)
    except UNREADABLE:
        return 1
    return found if isinstance(found, int) else 1


def colours(image: Image.Image) -> Image.Image:
    """An image in RGB: of 16 bits the upper 8, and what is transparent white."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")
