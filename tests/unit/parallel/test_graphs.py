"""A model whose step cannot be captured as a CUDA graph: what is said of it, where the end of the capture raises once more."""

import pytest
import torch

from pipeline.config import ConfigError
from pipeline.parallel.graphs import why_not_captured


class Capture:
    """As torch's: leaving it after an error raises another one."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nCUDA kernel errors might be")


@pytest.mark.parametrize(
    ("first", "kind", "said"),
    [
        (RuntimeError("not permitted when stream is capturing\nmore"), ConfigError, "not permitted when stream is capturing"),
        (ValueError(), ConfigError, "ValueError"),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "CUDA out of memory"),
    ],
)
def test_what_went_wrong_first_is_told(first: Exception, kind: type[Exception], said: str) -> None:
    with pytest.raises(RuntimeError) as caught, Capture():
        raise first
    found = why_not_captured(caught.value)
    assert type(found) is kind
    expected = f"dist.strategy: graphs cannot capture this model's step ({said}); set dist.strategy: ddp"
    assert str(found) == (expected if kind is ConfigError else said)


def test_an_error_of_the_capture_itself_is_told() -> None:
    assert "(no stream); set" in str(why_not_captured(RuntimeError("no stream")))
