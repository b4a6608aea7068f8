"""mixup and cutmix: what they do to images and labels, and that nothing about it depends on the batch but the lane."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.config import Config
from pipeline.data import mixing
from pipeline.parallel.lanes import Task
from tests.unit.data.test_augment import noise

EVERYTHING = torch.arange(600)


def mixed(names: list[str], seed: int = 3, epoch: int = 2, lanes: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels before and after."""
    images, labels = noise(600, side=20), EVERYTHING % 10
    mix = mixing.build(names, seed, 600, 10)
    assert mix is not None
    parts = [mix(*one, epoch) for one in zip(images.chunk(lanes), labels.chunk(lanes), EVERYTHING.chunk(lanes), strict=True)]
    return images, labels, torch.cat([one[0] for one in parts]), torch.cat([one[1] for one in parts])


@pytest.mark.parametrize("names", [["mixup"], ["cutmix"], ["mixup", "cutmix"]], ids="-".join)
def test_it_depends_on_seed_epoch_and_lane_alone(names: list[str]) -> None:
    images, _, found, shares = mixed(names)
    assert found.dtype == torch.uint8
    assert not torch.equal(found, images)
    assert torch.allclose(shares.sum(1), torch.ones(600))
    assert all(map(torch.equal, mixed(names)[2:], (found, shares)))
    for other in (mixed(names, seed=4), mixed(names, epoch=3)):
        assert not torch.equal(other[2], found)
        assert not torch.equal(other[3], shares)
    # In lanes of twenty, only the first image of each has another one before it.
    cut = mixed(names, lanes=30)
    same = (cut[2] == found).flatten(1).all(1)
    assert same[EVERYTHING % 20 != 0].all()
    assert not same[::20].all()


def test_mixup_is_that_of_torchvision_for_every_image_by_itself() -> None:
    images, labels, found, shares = mixed(["mixup"])
    kept = torch.where(labels == labels.roll(1), 1, shares[EVERYTHING, labels])[:, None, None, None]
    # torchvision.transforms.v2.MixUp: one batch, rolled by one, times 1 - lambda.
    expected = images.float().roll(1, 0) * (1 - kept) + images.float() * kept
    assert (found.float() - expected).abs().max() <= 0.501
    assert torch.allclose(shares, F.one_hot(labels.roll(1), 10) * (1 - kept[:, :, 0, 0]) + F.one_hot(labels, 10) * kept[:, :, 0, 0])
    # Beta(0.2, 0.2), of which the larger share is the image's own.
    drawn = torch.distributions.Beta(0.2, 0.2).sample((100_000,))
    larger = torch.maximum(drawn, 1 - drawn)
    own = shares.amax(1)[labels != labels.roll(1)]
    for share in (0.6, 0.8, 0.95, 0.999):
        assert (own < share).float().mean() == pytest.approx(float((larger < share).float().mean()), abs=0.06)


def test_cutmix_puts_a_box_of_the_image_before_and_its_share_of_the_label() -> None:
    images, labels, found, shares = mixed(["cutmix"])
    before, areas = images.roll(1, 0), list[float]()
    for index in range(600):
        # Noise: two images agree in all channels of a pixel nearly never.
        taken = (found[index] == before[index]).all(0) & (found[index] != images[index]).any(0)
        assert torch.equal(found[index], torch.where(taken, before[index], images[index]))
        rows, columns = taken.any(1).nonzero(), taken.any(0).nonzero()
        area = 0 if not len(rows) else int((rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1))
        assert area == taken.sum()
        assert shares[index, labels[index]] == pytest.approx(1 - area / 400, abs=1e-6)
        areas.append(area / 400)
    # As of torchvision.transforms.v2.CutMix with alpha 1: half of the area is asked for, and edges cut off some.
    assert 0.25 < sum(areas) / 600 < 0.4
    assert max(areas) > 0.8


def test_of_both_each_image_has_one() -> None:
    images, _, found, _ = mixed(["mixup", "cutmix"])
    between = ((found != images) & (found != images.roll(1, 0))).flatten(1).float().mean(1) > 0.02
    boxed = ((found == images) | (found == images.roll(1, 0))).flatten(1).all(1)
    assert 0.3 < between.float().mean() < 0.6
    assert 0.4 < boxed.float().mean() < 0.7


def test_the_loss_is_of_both_classes_and_the_larger_share_is_right() -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    weights = torch.linspace(0.5, 2, 10)
    own, other, share = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 4]), torch.tensor([0.9, 0.3, 0.6, 1.0])
    targets = F.one_hot(own, 10) * share[:, None] + F.one_hot(other, 10) * (1 - share[:, None])
    task = Task(torch.nn.Identity(), lambda *_: (logits, targets), 1, 0.0, torch.no_grad, weights)
    loss, compute_row = task.loss(torch.nn.Identity(), logits, targets)
    single = [F.cross_entropy(logits, one, weights, reduction="none") for one in (own, other)]
    assert loss == pytest.approx((share * single[0] + (1 - share) * single[1]).sum().item(), rel=1e-5)
    assert compute_row()[1] == (logits.argmax(1) == torch.tensor([1, 6, 3, 4])).sum()


def test_what_mixes_nothing_is_none_and_lanes_of_one_image_are_refused() -> None:
    assert mixing.build("crop-flip", 1, 9, 2) is None
    assert mixing.build(["flip", "erasing"], 1, 9, 2) is None
    values = {"data": {"augment": ["flip", "cutmix", "mixup"]}, "dist": {"world_size": 2, "batch_size_per_gpu": 4, "lanes": 4}}
    assert Config.model_validate(values).data.mixes == {"cutmix", "mixup"}
    values["dist"] |= {"lanes": 8}
    with pytest.raises(ValueError, match=r"data.augment: cutmix mixes two images of a lane, and each has one; set fewer dist.lanes"):
        Config.model_validate(values)
