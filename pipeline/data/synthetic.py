"""Images drawn from a seed, with something to learn in them: for tests, benchmarks and a first look."""

import numpy as np

from pipeline.config import draw_seed
from pipeline.data import Raw, Request, Split

NUM_CLASSES = 10
SIDE = 28


def load(request: Request) -> Raw:
    """`synthetic:N` has N training and N // 2 test images: a pattern for each class, under noise."""
    count = int(request.argument or 4096)
    random = np.random.Generator(np.random.PCG64(draw_seed(request.seed, "synthetic")))
    patterns = random.integers(0, 2, (NUM_CLASSES, 1, 7, 7)).repeat(4, axis=2).repeat(4, axis=3) * 96

    def split(size: int) -> Split:
        labels = random.integers(0, NUM_CLASSES, size)
        noise = random.integers(0, 160, (size, 1, SIDE, SIDE))
        return Split((patterns[labels] + noise).astype(np.uint8), labels.astype(np.int64))

    return Raw(split(count), split(count // 2), [f"pattern {number}" for number in range(NUM_CLASSES)], depends_on_seed=True)
