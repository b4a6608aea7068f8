"""The process group: join it, leave it, who am I, and the few things that ranks tell each other."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """One rank's view of the process group."""

    rank: int
    size: int
    device: torch.device
    # A group on the CPU for flags and bytes: it never waits for a stream of a GPU.
    control: "dist.ProcessGroup"

    def only_first(self, thing: Callable[[], T], otherwise: T) -> T:
        """The thing on rank 0, on every other rank something that does nothing."""
        return thing() if self.rank == 0 else otherwise

    def gather_rows(self, rows: Tensor, rows_per_rank: list[int]) -> Tensor:
        """The rows of all ranks, in the order of ranks, on every rank; the network only moves them."""
        most = max(rows_per_rank)
        padded = torch.zeros((most, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        padded[: len(rows)] = rows
        everyone = torch.empty((self.size * most, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        dist.all_gather_single(everyone, padded)
        return torch.cat([everyone[rank * most : rank * most + count] for rank, count in enumerate(rows_per_rank)])

    def sum_integers(self, values: Tensor) -> Tensor:
        """Sums over all ranks of whole numbers, which no order can change."""
        assert not values.is_floating_point()
        total = values.clone()
        dist.all_reduce(total)
        return total

    def start_any(self, flag: bool) -> Callable[[], bool]:
        """Begin to ask whether any rank says yes; the returned function waits for the answer, the same on all ranks."""
        answer = torch.tensor([flag], dtype=torch.uint8)
        work = dist.all_reduce(answer, dist.ReduceOp.MAX, group=self.control, async_op=True)
        assert work is not None

        def wait() -> bool:
            work.wait()
            return bool(answer.item())

        return wait

    def from_first(self, content: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        size = torch.tensor([len(content)])
        dist.broadcast(size, 0, group=self.control)
        buffer = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8) if self.rank == 0 and content else torch.empty(0, dtype=torch.uint8)
        )
        if self.rank != 0:
            buffer = torch.empty(int(size.item()), dtype=torch.uint8)
        if len(buffer):
            dist.broadcast(buffer, 0, group=self.control)
        return buffer.numpy().tobytes()


def torchrun_store(timeout_seconds: float) -> Store:
    """The agent's store, in a corner of its own for each attempt.

    torchrun keeps one store through all restarts (torch 2.14): without the prefix, a rank of the second attempt may read
    where a rank of the first one listened, and wait for it until its timeout.
    """
    host, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout_seconds)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # pyright: ignore[reportPrivateImportUsage]
    return PrefixStore(f"{os.environ['TORCHELASTIC_RUN_ID']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def join(device_type: str, backend: str, store: Store, timeout_seconds: float) -> Ranks:
    """Join the group of RANK and WORLD_SIZE that meets in a store."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    return Ranks(rank, size, device, control)


def leave() -> None:
    """Leave the group."""
    dist.destroy_process_group()
