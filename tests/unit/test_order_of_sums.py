"""Another order of sums is seen, however little of it a number format shows."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline import order_of_sums
from pipeline.order_of_sums import (
    ALIGNED_BYTES,
    MOST_WEIGHTS,
    alike,
    cancelling,
    constant,
    convolutions_alike,
    form,
    gradients_alike,
    gradients_of_rows_alike,
    pieces,
    products_alike,
)

ROWS, LANES = 8, 4


def sums(weight: Tensor, turned_from: int):
    """A product that adds from the other end where there are so many rows."""

    def compute(rows: Tensor) -> Tensor:
        turn = len(rows) >= turned_from
        order = torch.arange(weight.shape[1]).flip(0) if turn else torch.arange(weight.shape[1])
        total = torch.zeros(len(rows), len(weight))
        for column in order.tolist():
            total += rows[:, column, None].float() * weight[:, column].float()
        return total.to(rows.dtype)

    return compute


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 10), (3, 64), (5, 129)], ids=str)
def test_another_order_is_seen(shape: tuple[int, int], dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    weight, rows = cancelling(shape, False, 1, source).to(dtype), constant((ROWS, shape[1]), source).to(dtype)
    assert not alike(sums(weight, ROWS), LANES, rows)
    assert alike(sums(weight, ROWS + 1), LANES, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_another_order_within_halves_is_seen(dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    weight, rows = cancelling((4, 64), False, 1, source).to(dtype), constant((ROWS, 64), source).to(dtype)
    parts = [[sums(half, turned_from) for half in weight.split(32, 1)] for turned_from in (ROWS, ROWS + 1)]

    def compute(some: Tensor) -> Tensor:
        chosen = parts[0] if len(some) >= ROWS else parts[1]
        return sum(one(half).float() for one, half in zip(chosen, some.split(32, 1), strict=True)).to(dtype)  # pyright: ignore

    assert not alike(compute, LANES, rows.float())


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"), [((6, 4, 3, 3), 1), ((6, 4, 3, 3), 3), ((6, 1, 3, 3), 6), ((1, 5, 5, 5), 1), ((7, 3), 1)], ids=str
)
def test_weights_cancel_each_other(shape: tuple[int, ...], groups: int, outputs: bool) -> None:
    weight = cancelling(shape, outputs, groups, torch.Generator().manual_seed(0)).double().view(groups, -1, *shape[1:])
    summed = 1 if outputs else 2
    total = weight.flatten(3).sum(3) if weight.shape[summed] == 1 else weight.sum(summed)
    assert torch.equal(total, torch.zeros_like(total))
    assert weight.count_nonzero() >= 0.6 * weight.numel()
    assert len(weight.unique()) >= 0.6 * weight.numel()


def test_a_constant_for_each_image() -> None:
    image = constant((4, 3, 2, 2), torch.Generator().manual_seed(0))
    assert [len(one.unique()) for one in image] == [1] * 4
    assert len(image.unique()) == 4


def test_lanes_begin_as_tensors_do() -> None:
    whole = torch.arange(3 * 4.0).view(4, 3)
    parts = pieces(2, whole, torch.zeros(64))
    assert [one.tolist() for one, _ in parts] == [whole[:2].tolist(), whole[2:].tolist()]
    assert all(part.data_ptr() % ALIGNED_BYTES == 0 for lane in parts for part in lane)
    assert pieces(1, whole)[0][0] is whole


def test_what_leaves_nothing_tells_nothing() -> None:
    assert not products_alike((8, 1), (4, 1), torch.float32, True, 2)
    assert not alike(torch.zeros_like, 2, torch.ones(4))
    assert not products_alike((8, 4), (MOST_WEIGHTS, 4), torch.float32, True, 2)


def test_a_form_is_that_of_the_tensor() -> None:
    """Where one channel is, two memory orders look alike, and another kernel is chosen by one of them."""
    images = torch.randn(4, 1, 3, 3).to(memory_format=torch.channels_last)
    for one in (images, torch.randn(4, 1, 3, 3), torch.randn(2, 3, 4, 5).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)):
        made = form(one).of(one.float())
        assert (made.shape, made.stride(), made.dtype) == (one.shape, one.stride(), one.dtype)
        assert torch.equal(made, one)
    assert torch.equal(form(images[:1].expand(4, 3, 3, 3)).of(torch.ones(4, 3, 3, 3)), torch.ones(4, 3, 3, 3))


def test_convolutions_and_products_are_alike_where_all_are_computed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (1, 1), (1, 1), (1, 1), 1
    one, weight = form(torch.zeros(4, 6, 5, 5)), form(torch.zeros(8, 6, 3, 3))
    conv2d = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda images, *rest: torch.cat([conv2d(some, *rest) for some in images.split(1)]))
    assert convolutions_alike(one, weight, True, settings, 2)
    monkeypatch.setattr(F, "conv2d", lambda images, *rest: conv2d(images if len(images) < 4 else images * (1 + 2**-20), *rest))
    assert not convolutions_alike(one, weight, False, settings, 2)


def test_gradients_of_images_are_alike_where_all_are_computed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (1, 1), (1, 1), (1, 1), 1
    weight = form(torch.zeros(8, 6, 3, 3))
    kernel = order_of_sums.gradient_of_images

    def by_themselves(gradient: Tensor, images: Tensor, *rest: Any) -> Tensor:
        return torch.cat([kernel(*one, *rest) for one in zip(gradient.split(1), images.split(1), strict=True)])

    def otherwise_for_many(gradient: Tensor, *rest: Any) -> Tensor:
        return kernel(gradient if len(gradient) < 4 else gradient * (1 + 2**-20), *rest)

    monkeypatch.setattr(order_of_sums, "gradient_of_images", by_themselves)
    assert gradients_alike(form(torch.zeros(4, 6, 5, 5)), weight, settings, 2)
    monkeypatch.setattr(order_of_sums, "gradient_of_images", otherwise_for_many)
    # Tried once for each form: so others.
    assert not gradients_alike(form(torch.zeros(4, 6, 5, 7)), weight, settings, 2)


def test_gradients_of_rows_are_alike_where_all_are_computed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    mm = Tensor.mm
    monkeypatch.setattr(Tensor, "mm", lambda rows, matrix: torch.cat([mm(one, matrix) for one in rows.split(1)]))
    assert gradients_of_rows_alike((4, 10), (10, 33), torch.float32, 2)
    monkeypatch.setattr(Tensor, "mm", lambda rows, matrix: mm(rows if len(rows) < 4 else rows * (1 + 2**-20), matrix))
    assert not gradients_of_rows_alike((4, 10), (10, 34), torch.float32, 2)
