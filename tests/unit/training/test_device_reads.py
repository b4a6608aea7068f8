"""A GPU runs ahead of its rank: nothing reads from it between two log lines, and what must be read is read at once."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeline.parallel import lane_groups
from pipeline.ranks import Ranks
from pipeline.tracking.journal import Silent
from pipeline.training import guard, loop, train_rank
from pipeline.training.stopping import Stop
from tests.kit.experiment import make_job

# What makes the host wait until a GPU has computed a value: reading it, and operations whose result's size depends on values.
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose")
READS += ("nonzero", "bincount", "unique", "masked_select", "is_nonzero", "repeat_interleave", "one_hot")


class Reads(TorchFunctionMode):
    """Counts the reads of device values, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in READS or (name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool):
            self.seen[name] += 1
        return func(*args, **kwargs or {})

    def taken(self) -> dict[str, int]:
        seen, self.seen = dict(self.seen), Counter()
        return seen


class Watched(Silent):
    """A journal that notes what was read before each of its lines."""

    def __init__(self, reads: Reads):
        self._reads, self.lines = reads, list[tuple[str, dict[str, int]]]()

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.lines.append(("validation" if "validation/loss" in values else "log", self._reads.taken()))


@pytest.mark.parametrize(("reduction", "lanes", "augment"), [("ordered", 3, "crop-flip"), ("native", None, "none")])
def test_nothing_is_read_from_the_device_between_two_log_lines(
    reduction: str, lanes: int | None, augment: str, alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"name": "synthetic:1600", "validation_share": 0.5, "augment": augment, "image_size": 8}
    dist = {"world_size": 1, "batch_size_per_gpu": 12, "reduction": reduction, "lanes": lanes}
    job = make_job(tmp_path, model__name="resnet18", data=data, train__epochs=2, dist=dist)
    # As on a GPU. The flag of a stop request is a value of the host.
    monkeypatch.setattr(guard, "runs_ahead", lambda _: True)
    monkeypatch.setattr(Stop, "agreed", lambda self: False)
    # On a GPU lanes are never tried at once.
    monkeypatch.setattr(lane_groups, "TIMED_STEPS", 100)
    monkeypatch.setattr(train_rank, "plan", lambda *_: loop.Steps(12, 6, 2, 1000, 12))
    reads = Reads()
    journal = Watched(reads)
    with reads:
        train_rank.train(job, alone, journal)
    kinds = [kind for kind, _ in journal.lines]
    assert kinds == 2 * ["log", "log", "log", "validation"]
    # Whether a gradient was non-finite, and the means over the batch. What is read before lines 0 and 4 is read by restoring and saving.
    assert [journal.lines[index][1] for index in (1, 2, 5, 6)] == [{"item": 1, "tolist": 1}] * 4
    # Whether gradients, weights and the optimizer's state are finite, the loss, and the counts: four chunks of images or one. One of the
    # items is the host's own: whether all ranks found the same.
    assert [journal.lines[index][1] for index in (3, 7)] == [{"item": 3, "tolist": 1, "cpu": 2, "__int__": 2}] * 2
