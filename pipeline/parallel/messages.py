"""Tensors of any shape from one rank to another, with their memory order: kernels choose by it, and so do bits."""

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.ranks import Ranks

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool)
# Type, number of dimensions, and room for sizes and strides.
HEADER, DIMENSIONS = 18, 8


class Messages:
    """Sends without waiting; messages between two ranks arrive in the order in which they were sent. Every rank must build one."""

    def __init__(self, ranks: Ranks, timeout: timedelta, most: int):
        self._heartbeat, self._device = ranks.heartbeat, ranks.device
        # Of its own: nccl sends one message after another, and those of another direction must not wait for these.
        group = dist.new_group(timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        # gloo sends what is in host memory.
        self._through = torch.device("cpu") if dist.get_backend() == "gloo" else ranks.device
        # What is under way, `most` messages before it waits for the oldest.
        self._under_way, self._most = deque[tuple[Any, Tensor]](), 2 * most

    def send(self, value: Tensor, rank: int) -> None:
        """Start to send."""
        value = value if is_dense(value) else value.contiguous()
        shape, strides = list(value.shape), list(value.stride())
        padding = [0] * (DIMENSIONS - value.ndim)
        header = torch.tensor([TYPES.index(value.dtype), value.ndim, *shape, *padding, *strides, *padding], device=self._through)
        for one in (header, in_memory(value).to(self._through)):
            # Until it has arrived it must not change.
            self._under_way.append((dist.isend(one, rank, self._group), one))
        self.wait(self._most)

    def receive(self, rank: int) -> Tensor:
        """Wait for the next message of a rank."""
        self._heartbeat.waiting()
        header = torch.empty(HEADER, dtype=torch.int64, device=self._through)
        dist.recv(header, rank, self._group)
        kind, dimensions, *rest = header.tolist()
        value = torch.empty_strided(rest[:dimensions], rest[DIMENSIONS : DIMENSIONS + dimensions], dtype=TYPES[kind], device=self._through)
        dist.recv(in_memory(value), rank, self._group)
        self._heartbeat.computing()
        return value.to(self._device) if TYPES[kind] != torch.uint8 else value

    def wait(self, left: int = 0) -> None:
        """Wait until all has been sent but the last ones."""
        while len(self._under_way) > left:
            self._heartbeat.waiting()
            self._under_way.popleft()[0].wait()
            self._heartbeat.computing()


def in_memory(value: Tensor) -> Tensor:
    """A dense tensor as it lies in memory."""
    return value.as_strided((value.numel(),), (1,))


def is_dense(value: Tensor) -> bool:
    """Return True if a tensor fills its memory, in whichever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
