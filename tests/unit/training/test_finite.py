"""What is not finite is found in any tensor, wherever it stands."""

import math

import pytest
import torch
from torch import Tensor

from pipeline.training import guard
from pipeline.training.guard import is_finite, whole_buckets


def each_finite(tensors: list[Tensor]) -> list[bool]:
    found = [is_finite(one) for one in tensors]
    # As on a GPU.
    assert guard.each_finite(tensors).tolist() == found
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0])
def test_a_value_that_is_not_finite_is_found_wherever_it_stands(value: float) -> None:
    for place in range(12):
        image = torch.arange(12.0).reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        image[0, place // 4, place // 2 % 2, place % 2] = value
        found = each_finite([torch.zeros(()), image, torch.tensor([1e300], dtype=torch.float64)])
        assert found == [True, math.isfinite(value), True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_found_in_every_lane_of_a_vector_and_beyond_the_last_one(value: float, dtype: torch.dtype) -> None:
    # A vector of AVX-512 has 16 numbers of fp32 and 32 of bf16, and several are computed at once.
    size = 64 * 4 + 7
    tensors = [torch.linspace(-1, 1, size).to(dtype), torch.zeros(2 * size, dtype=dtype)[::2], torch.zeros(size, 3, dtype=dtype).T]
    for place in range(size):
        for changed, tensor in enumerate(tensors):
            row = tensor if tensor.dim() == 1 else tensor[place % 3]
            before = row[place].item()
            row[place] = value
            assert each_finite(tensors) == [number != changed for number in range(3)]
            row[place] = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_bucket_is_looked_at_whole_if_gradients_fill_it(dtype: torch.dtype) -> None:
    # As fp32, a pair of the first in bf16 and half of the last in fp64 would be NaN.
    bucket, other = (torch.tensor([1.0, -3e38, *range(9), 1 + 2**-20 - 2**-52], dtype=dtype) for _ in range(2))
    assert each_finite([bucket]) == [True]
    views = [bucket[:5], bucket[5:8].view(3, 1), bucket[8:].view(2, 2).T]
    alone, rest = torch.zeros(3, 2).T, [other[:5], other[6:]]
    found = whole_buckets([views[0], rest[0], alone, *views[1:], rest[1]])
    assert {one.dtype for one in found} == {dtype, torch.float32}
    assert [one.tolist() for one in found] == [bucket.tolist(), rest[0].tolist(), rest[1].tolist(), [0.0] * 6]
    for place in range(12):
        bucket[place] = math.nan
        assert each_finite(whole_buckets(views)) == [False]
        bucket[place] = 0.0
    # What no gradient fills is nobody's.
    other[5] = math.nan
    assert each_finite(whole_buckets(rest)) == [True, True]
