"""Images in, class names and probabilities out: MLflow keeps this file and `pictures.py` beside the program, and no other of this code.

Images are uint8 [N, C, H, W] from 0 to 255, or files in a list or in the column `image` of a table: a path (pathlib.Path), the content as
bytes, or the content in base64. A text is never a path: whoever may ask a server could name its files.
"""

import base64
import binascii
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.pictures import FORMATS, square

# As evaluate has them: a batch of another size may differ in the last bits.
CHUNK = 250
COLUMN = "image"


class ImageClassifier:
    """What `mlflow.pyfunc.load_model` returns."""

    def __init__(self, folder: Path):
        facts = json.loads((folder / "facts.json").read_text())
        self._names: list[str] = facts["classes"]
        self._shape: tuple[int, int, int] = tuple(facts["shape"])
        self._dtype = torch.bfloat16 if facts["precision"] == "bf16" else None
        # As evaluate has it, so that the same kernels give the same bits.
        self._model = torch.export.load(folder / "model.pt2").module().to(memory_format=torch.channels_last)

    def predict(self, images: Any, params: dict[str, Any] | None = None) -> Any:
        """Return a row for each image: the class, its probability, and the probability of every class."""
        import pandas as pd

        pixels = torch.from_numpy(self._pixels(images))
        with torch.no_grad(), torch.autocast("cpu", self._dtype, enabled=self._dtype is not None):
            pieces = [self._model(pixels[start : start + CHUNK]).float().softmax(1) for start in range(0, len(pixels), CHUNK)]
        found = torch.cat(pieces).numpy() if pieces else np.zeros((0, len(self._names)), np.float32)
        best = found.argmax(1)
        first = {"class": [self._names[index] for index in best], "probability": found.max(1, initial=0)}
        return pd.DataFrame(first | {f"p({name})": found[:, index] for index, name in enumerate(self._names)})

    def _pixels(self, images: Any) -> Any:
        """Images as uint8 [N, C, H, W], whatever they come as."""
        if hasattr(images, "columns"):
            if COLUMN not in images.columns:
                raise ValueError(f"expected a column {COLUMN!r} with paths or contents of image files, found {list(images.columns)}")
            images = images[COLUMN].tolist()
        if isinstance(images, np.ndarray) and images.dtype.kind in "USO":
            # As a server makes of a list in JSON.
            images = images.reshape(-1).tolist()
        if isinstance(images, list) and images and isinstance(images[0], str | bytes | Path):
            images = [self._decoded(one) for one in images]
        array = np.asarray(images)
        if array.ndim == 3 and self._shape[0] == 1:
            array = array[:, None]
        if array.ndim != 4 or array.shape[1:] != self._shape:
            raise ValueError(f"expected images of shape [N, {', '.join(map(str, self._shape))}], found {list(array.shape)}")
        if array.dtype.kind not in "iu" or (array.size and (array.min() < 0 or array.max() > 255)):
            raise ValueError(f"expected whole numbers from 0 to 255, found {array.dtype}")
        return np.ascontiguousarray(array, np.uint8)

    def _decoded(self, image: str | bytes | Path) -> Any:
        """The pixels of a file, as prepare has those of images in folders."""
        from PIL import Image

        channels, side, _ = self._shape
        with Image.open(io.BytesIO(content(image)), formats=FORMATS) as opened:
            pixels = np.asarray(square(opened, side).convert({1: "L", 3: "RGB"}[channels]))
        return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def content(image: str | bytes | Path) -> bytes:
    """The content of an image's file."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, Path):
        return image.read_bytes()
    try:
        return base64.b64decode(image, validate=True)
    except binascii.Error:
        raise ValueError(f"{image[:80]!r}: is not base64; a path is given as pathlib.Path") from None


def _load_pyfunc(path: str) -> ImageClassifier:  # pyright: ignore[reportUnusedFunction]
    """What MLflow calls."""
    return ImageClassifier(Path(path))
