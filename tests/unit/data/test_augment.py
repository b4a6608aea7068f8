"""Augmentations: what each does to an image, and that nothing about it depends on the batch."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional

from pipeline.config import Config, ConfigError
from pipeline.data import augment
from pipeline.data.augment import ColourJitter, Drawn, Erasing, ResizedCrop, grey

MEAN = [0.1, 0.5, 0.9]
STEPS = ["crop", "flip", "resized-crop", "colour-jitter", "erasing"]


def noise(count: int, channels: int = 3, side: int = 12) -> Tensor:
    return torch.randint(256, (count, channels, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def smooth(count: int, side: int) -> Tensor:
    """As pixels of a photograph: like their neighbours."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 255
    return torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("names", ["crop-flip", *([one] for one in STEPS), STEPS], ids=str)
def test_it_depends_on_seed_epoch_and_sample_and_not_on_the_batch(names: str | Sequence[str], channels: int) -> None:
    images, everything, mean = noise(50, channels), torch.arange(50), MEAN[:channels]
    before = images.clone()
    whole = augment.build(names, 9, 50, mean)(images, everything, 4)
    assert whole.dtype == torch.uint8
    assert whole.shape == images.shape
    assert torch.equal(images, before)
    assert not torch.equal(whole, images)
    other = augment.build(names, 9, 50, mean)
    for lane in (*everything.flip(0).split(7), *everything.split(1)):
        assert torch.equal(other(images[lane], lane, 4), whole[lane])
    assert not torch.equal(other(images, everything, 5), whole)
    assert not torch.equal(augment.build(names, 8, 50, mean)(images, everything, 4), whole)


def test_crop_flip_depends_on_seed_epoch_and_sample_and_not_on_the_batch() -> None:
    images = torch.randint(256, (50, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    everything = torch.arange(50)
    whole = augment.build("crop-flip", 9, 50, MEAN)(images, everything, 4)
    other = augment.build("crop-flip", 9, 50, MEAN)
    for lane in everything.flip(0).split(7):
        assert torch.equal(other(images[lane], lane, 4), whole[lane])
    assert not torch.equal(other(images, everything, 5), whole)
    assert not torch.equal(augment.build("crop-flip", 8, 50, MEAN)(images, everything, 4), whole)


def test_crop_flip_gives_shifted_and_mirrored_images() -> None:
    image = torch.arange(1, 145, dtype=torch.uint8).view(1, 1, 12, 12)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))[0, 0]
    possible = {}
    for top in range(9):
        for left in range(9):
            window = padded[top : top + 12, left : left + 12]
            possible[window.contiguous().numpy().tobytes()] = (top, left, False)
            possible[window.flip(1).contiguous().numpy().tobytes()] = (top, left, True)
    changed = augment.build("crop-flip", 1, 4000, MEAN)(image.expand(4000, 1, 12, 12), torch.arange(4000), 0)
    drawn = [possible[one.contiguous().numpy().tobytes()] for one in changed]
    assert len(set(drawn)) == 162
    assert 1800 < sum(flipped for _, _, flipped in drawn) < 2200


def test_crop_flip_is_a_pad_a_crop_and_a_flip_of_torchvision() -> None:
    images = torch.randint(256, (40, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    augmented = augment.build("crop-flip", 7, 40, MEAN)
    changed = augmented(images, torch.arange(40), 3)
    assert isinstance(augmented, augment.CropFlip)
    for image, mine, (top, left), flip in zip(images, changed, augmented._shifts.tolist(), augmented._flips.tolist(), strict=True):
        cropped = functional.crop(functional.pad(image, [augment.PAD] * 4), top, left, 12, 12)
        assert torch.equal(mine, functional.hflip(cropped) if flip else cropped)


def drawn(part: ResizedCrop | ColourJitter | Erasing, count: int, side: int) -> list[list[float]]:
    draws: Drawn = part._draws
    return draws(torch.arange(count), 0, side).tolist()


def test_a_crop_and_a_flip_are_those_of_torchvision() -> None:
    images, everything = noise(40), torch.arange(40)
    shifts, flips = Drawn(7, 40, "crop", augment._shifts), Drawn(7, 40, "flip", augment._flips)
    cropped, flipped = augment.Crop(shifts)(images, everything, 0), augment.Flip(flips)(images, everything, 0)
    drawn = zip(shifts(everything, 0, 12).tolist(), flips(everything, 0, 12).tolist(), strict=True)
    for image, mine, turned, ((top, left), flip) in zip(images, cropped, flipped, drawn, strict=True):
        assert torch.equal(mine, functional.crop(functional.pad(image, [augment.PAD] * 4), top, left, 12, 12))
        assert torch.equal(turned, functional.hflip(image) if flip else image)
    assert 10 < flips(everything, 0, 12).sum() < 30


def test_a_resized_crop_is_that_of_torchvision_within_one_level() -> None:
    part, images = ResizedCrop(Drawn(3, 400, "resized-crop", augment._rectangles(augment.CROP_AREA, augment.CROP_RATIO))), smooth(400, 32)
    found, rectangles = part(images, torch.arange(400), 0), drawn(part, 400, 32)
    for image, mine, (top, left, height, width) in zip(images, found, rectangles, strict=True):
        theirs = functional.resized_crop(image, int(top), int(left), int(height), int(width), [32, 32], antialias=False)
        assert (mine.int() - theirs.int()).abs().max() <= 1
    areas = [height * width / 32**2 for _, _, height, width in rectangles]
    assert min(areas) < 0.15
    assert max(areas) > 0.9
    assert all(0 <= top <= 32 - height and 0 <= left <= 32 - width for top, left, height, width in rectangles)
    assert all(0.6 < height / width < 1.7 for _, _, height, width in rectangles if 32 not in (height, width) and min(height, width) > 9)


def test_a_colour_jitter_is_that_of_torchvision_within_rounding() -> None:
    part, images = ColourJitter(Drawn(3, 200, "colour-jitter", augment._factors)), noise(200, side=24)
    found, factors = part(images, torch.arange(200), 0), drawn(part, 200, 24)
    for image, mine, (brightness, contrast, saturation) in zip(images, found, factors, strict=True):
        theirs = functional.adjust_brightness(image.float() / 255, brightness)
        theirs = functional.adjust_saturation(functional.adjust_contrast(theirs, contrast), saturation)
        assert (mine - theirs * 255).abs().max() <= 1.1
    assert all(0.6 <= one <= 1.4 for row in factors for one in row)
    assert min(min(factors)) < 0.7
    assert max(max(factors)) > 1.3


def test_grey_images_keep_their_one_channel_and_change_in_brightness_and_contrast_alone() -> None:
    part, images = ColourJitter(Drawn(3, 20, "colour-jitter", augment._factors)), noise(20, 1)
    alike = part(images.expand(20, 3, 12, 12), torch.arange(20), 0)
    assert (grey(alike.float()) - part(images, torch.arange(20), 0).float()).abs().max() < 1.5


def test_every_second_image_loses_a_rectangle_to_the_mean() -> None:
    part, images = Erasing(Drawn(3, 1000, "erasing", augment._erased), MEAN), noise(1000, side=20)
    found, rectangles = part(images, torch.arange(1000), 0), drawn(part, 1000, 20)
    for image, mine, (top, left, height, width) in zip(images, found, rectangles, strict=True):
        mean = torch.tensor([[[round(255 * one)]] for one in MEAN], dtype=torch.uint8)
        expected = functional.erase(image, int(top), int(left), int(height), int(width), mean) if height else image
        assert torch.equal(mine, expected)
    erased = [height * width / 400 for _, _, height, width in rectangles if height]
    assert 430 < len(erased) < 570
    assert max(erased) < 0.36


@pytest.mark.parametrize("steps", [[], ["flip", "flip"], ["turn"], "flip", ["mixup", "flip"], ["cutmix", "crop", "mixup"]])
def test_what_is_no_augmentation_is_refused(steps: object) -> None:
    with pytest.raises(ValueError, match="augment"):
        Config.model_validate({"data": {"augment": steps}})
    assert Config.model_validate({"data": {"augment": STEPS}}).data.augment == STEPS


def test_colours_of_two_channels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.augment: colour-jitter is for images of 1 or 3 channels, these have 2; leave it out"):
        augment.build(["colour-jitter"], 1, 9, [0.5, 0.5])
