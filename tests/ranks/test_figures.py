"""Figures of an evaluation: every sample once, the same on any number of ranks, equal to a loop over images and to plain torch."""

import operator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pipeline import models
from pipeline.data import Split, store
from pipeline.data.batches import Pixels
from pipeline.training.evaluation import Evaluation
from tests.kit.devices import also_on_gpu
from tests.kit.experiment import make_job


def evaluated(group, prepared: Path, count: int) -> tuple[float, int, int, int, list[list[int]]]:
    manifest, split = store.read_manifest(prepared), store.open_split(prepared, "test")
    torch.manual_seed(0)
    model = models.build("lenet", 1, 28, 10).to(group.device)
    pixels = Pixels(manifest.mean, manifest.std, group.device)
    result = Evaluation(Split(split.images[:count], split.labels[:count]), pixels, 10, group)(model, None)
    return result.loss, result.correct, result.top5_correct, result.total, result.confusion.tolist()


class Coarse(nn.Module):
    """Logits that are whole numbers from -2 to 2, so that most images have classes that tie."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)[:, :640].reshape(-1, 10, 64).sum(2).div(16).round().clamp(-2, 2)


def coarse(group, prepared: Path, count: int) -> tuple[int, int, list[list[int]]]:
    manifest, split = store.read_manifest(prepared), store.open_split(prepared, "test")
    pixels = Pixels(manifest.mean, manifest.std, group.device)
    result = Evaluation(Split(split.images[:count], split.labels[:count]), pixels, 10, group)(Coarse(), None)
    return result.correct, result.top5_correct, result.confusion.tolist()


COUNTS = [1, 3, 250, 1009]


@pytest.mark.fault(14, "1, 3, 250 and 1009 images on 1, 2 and 3 ranks")
@also_on_gpu("evaluation: the same figures on one, two and three ranks")
def test_figures_are_equal_on_one_two_and_three_ranks_for_sizes_that_nothing_divides(device: str, tmp_path: Path, run_ranks) -> None:
    prepared = make_job(tmp_path, data={"name": "synthetic:2018"}).prepared
    work = [*((evaluated, (prepared, count)) for count in COUNTS), (coarse, (prepared, 1009))]
    everyone = [result for size in (1, 2, 3) for result in run_ranks(size, *work, device=device)]
    assert len(everyone) == 6
    assert all(results == everyone[0] for results in everyone)
    for count, (_, correct, top5, total, confusion) in zip(COUNTS, everyone[0][:-1], strict=True):
        assert total == count == np.sum(confusion)
        assert correct == np.trace(confusion) <= top5
    check_by_hand(prepared, *everyone[0][-1])


def check_by_hand(prepared: Path, correct: int, top5: int, confusion: list[list[int]]) -> None:
    """The same figures by a loop over images; of classes that tie, the first comes first."""
    manifest, split = store.read_manifest(prepared), store.open_split(prepared, "test")
    logits = Coarse()((torch.from_numpy(split.images).float() / 255 - manifest.mean[0]) / manifest.std[0]).tolist()
    expected = [[0] * 10 for _ in range(10)]
    surely, found, possibly = 0, 0, 0
    for label, row in zip(split.labels.tolist(), logits, strict=True):
        expected[label][row.index(max(row))] += 1
        above, level = (sum(test(value, row[label]) for value in row) for test in (operator.gt, operator.eq))
        surely += above + level <= 5
        found += above + row[:label].count(row[label]) < 5
        possibly += above < 5
    assert confusion == expected
    assert correct == sum(expected[label][label] for label in range(10))
    assert top5 == found
    assert surely < found < possibly < 1009, "no image has a tie at the fifth place"
    assert expected != [list(column) for column in zip(*expected, strict=True)], "a transposed matrix would be the same"


def test_figures_are_those_of_plain_torch(tmp_path: Path, run_ranks) -> None:
    prepared = make_job(tmp_path, data={"name": "synthetic:2018"}).prepared
    ((loss, correct, top5, _, _),) = run_ranks(2, (evaluated, (prepared, 1009)))[0]
    manifest, split = store.read_manifest(prepared), store.open_split(prepared, "test")
    torch.manual_seed(0)
    model = models.build("lenet", 1, 28, 10).eval()
    images = (torch.from_numpy(split.images).float() / 255 - manifest.mean[0]) / manifest.std[0]
    labels = torch.from_numpy(split.labels)
    with torch.no_grad():
        logits = model(images)
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert correct == (logits.argmax(1) == labels).sum().item()
    assert top5 == sum(int(label in row) for label, row in zip(labels.tolist(), logits.topk(5).indices.tolist(), strict=True))
