"""The process group: rendezvous, initialization, shutdown, and the collectives that are not the gradients'."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipeline.collectives import Shared, wait
from pipeline.config import MachineError
from pipeline.heartbeat import COMPUTING, Heartbeat
from pipeline.timeouts import CONNECT_SECONDS, GATHERING_SECONDS

T = TypeVar("T")


@dataclass
class Ranks:
    """One rank of the process group; whoever holds it stays with the rank when that enters another group."""

    rank: int
    size: int
    device: torch.device
    # A gloo group for flags and bytes, which never waits for a CUDA stream.
    control: "dist.ProcessGroup"
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None))
    # It runs on rank 0's machine, whose watchdog sees both.
    beside_rank_zero: bool = True
    # This rank is bound to CPUs of its own; whether the others are is to be asked.
    bound: bool = False
    # Where ranks share memory: for `start_maximum`, and for `gather_rows` of what is small.
    shared: Shared | None = None

    def on_rank_zero(self, thing: Callable[[], T], otherwise: T) -> T:
        """Return `thing()` on rank 0 and `otherwise` on every other rank."""
        return self.on_rank(0, thing, otherwise)

    def on_rank(self, rank: int, thing: Callable[[], T], otherwise: T) -> T:
        """The same for any rank."""
        return thing() if self.rank == rank else otherwise

    def become(self, other: "Ranks") -> None:
        """Be this rank of this other group."""
        self.rank, self.size, self.control, self.beside_rank_zero = other.rank, other.size, other.control, other.beside_rank_zero

    def while_others_wait(self, thing: Callable[[], None], phase: int = COMPUTING) -> None:
        """Run `thing` on rank 0, however long it takes; every rank waits for it. Ranks of other machines beat meanwhile, as rank 0 does."""
        with self.on_rank_zero(lambda: self.heartbeat.beating(phase), contextlib.nullcontext()):
            self.on_rank_zero(thing, None)
        # Not rank 0: that nobody comes to meet it must be seen.
        waiting = contextlib.nullcontext() if self.beside_rank_zero else self.heartbeat.beating(phase)
        self.heartbeat.waiting()
        with waiting:
            self.start_logical_or(False)()

    def gather_rows(self, rows: Tensor, rows_per_rank: list[int]) -> Tensor:
        """All-gather rows of unequal number: all ranks' rows, in rank order, on every rank."""
        most = max(rows_per_rank)
        padded = torch.zeros((most, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        padded[: len(rows)] = rows
        self.heartbeat.waiting()
        everyone = self.shared.gathered(padded) if self.shared is not None else None
        if everyone is None:
            everyone = torch.empty((self.size * most, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
            wait(dist.all_gather_single(everyone, padded, async_op=True))
        return torch.cat([everyone[rank * most : rank * most + count] for rank, count in enumerate(rows_per_rank)])

    def all_on_this_machine(self, flag: bool) -> bool:
        """Return whether it is true on every rank of this machine; every rank of all machines must call it."""
        flags = self.gather_rows(torch.tensor([[flag]], device=self.device), [1] * self.size).flatten().tolist()
        first = self.rank - int(os.environ.get("LOCAL_RANK", "0"))
        return all(flags[first : first + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))])

    def sum_integers(self, values: Tensor) -> Tensor:
        """All-reduce integers, whose sum no order can change."""
        assert not values.is_floating_point()
        total = values.clone()
        self.heartbeat.waiting()
        wait(dist.all_reduce(total, async_op=True))
        return total

    def maximum(self, values: Tensor) -> None:
        """All-reduce to the largest value, in place."""
        self.heartbeat.waiting()
        wait(dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True))

    def start_logical_or(self, flag: bool) -> Callable[[], bool]:
        """Start an asynchronous logical OR over all ranks; the returned function waits for it and returns the answer."""
        answer = self.start_maximum(flag)
        return lambda: bool(answer())

    def start_maximum(self, value: int) -> Callable[[], int]:
        """The same for the largest of small whole numbers."""
        if self.shared is not None:
            return self.shared.start_maximum(value)
        answer = torch.tensor([value], dtype=torch.uint8)
        work = dist.all_reduce(answer, dist.ReduceOp.MAX, group=self.control, async_op=True)
        assert work is not None

        def answered() -> int:
            wait(work)
            return int(answer.item())

        return answered

    def broadcast_bytes(self, content: bytes, source: int = 0) -> bytes:
        """Broadcast one rank's bytes; returns them on every rank."""
        size = torch.tensor([len(content)])
        self.heartbeat.waiting()
        wait(dist.broadcast(size, source, group=self.control, async_op=True))
        buffer = torch.empty(int(size.item()), dtype=torch.uint8)
        if content:
            buffer = self.on_rank(source, lambda: torch.frombuffer(bytearray(content), dtype=torch.uint8), buffer)
        self.broadcast(buffer, source)
        return buffer.numpy().tobytes()

    def broadcast(self, values: Tensor, source: int = 0) -> None:
        """Broadcast one rank's values, in the host's memory, in place."""
        if values.numel():
            # As bytes: gloo does not know every type.
            wait(dist.broadcast(values.view(-1).view(torch.uint8), source, group=self.control, async_op=True))

    def collected(self, own: Tensor, per_rank: list[int], everywhere: bool = False) -> Tensor:
        """Return all ranks' elements, in the host's memory and in the order of ranks, on rank 0 or everywhere; elsewhere nothing."""
        whole = torch.empty(sum(per_rank) if everywhere or self.rank == 0 else 0, dtype=own.dtype)
        if self.rank == 0:
            pieces = whole.split(per_rank)
            pieces[0].copy_(own)
            for rank, piece in enumerate(pieces[1:], 1):
                if piece.numel():
                    wait(self.control.recv([piece.view(torch.uint8)], rank, 0))
        elif per_rank[self.rank]:
            wait(self.control.send([own.view(torch.uint8)], 0, 0))
        if everywhere:
            self.broadcast(whole)
        return whole

    def beside(self) -> "Ranks":
        """Return the same ranks with a control group of its own, for a thread beside the training; every rank must call it."""
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=GATHERING_SECONDS))
        assert isinstance(control, dist.ProcessGroup)
        return replace(self, control=control, shared=None)


@dataclass(frozen=True)
class Rendezvous:
    """A process's rank and world size, and the store through which the group is initialized."""

    store: Store
    rank: int
    size: int
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None))
    beside_rank_zero: bool = True


def rendezvous(world_size: int, timeout_seconds: float, init_method: str = "env://") -> Rendezvous:
    """Read torchrun's rank and renumber, so that rank 0 runs on the leader's machine: only that one has the run's files.

    Our agent opens a new store for every attempt. A plain torchrun keeps one (torch 2.14), in which a rank of the second attempt would
    read the address of a rank of the first, and wait for it: there the attempt is part of every key.
    """
    heartbeat = Heartbeat(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != world_size:
        # torchrun takes a machine for dead whose clock is 15 s off, and then begins without it.
        raise MachineError(f"torchrun has brought {size} of {world_size} ranks together; see that the machines' clocks agree")
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else ""
    if attempt not in ("", "0") and os.environ["GROUP_WORLD_SIZE"] != "1":
        # Every agent counts for itself, so that ranks would not find each other.
        raise MachineError(
            "a plain torchrun starts lost ranks again on one machine only; on several use lead and join, see docs/several-machines.md"
        )
    leads = os.environ.get("LOCKSTEP_LEADS", str(int(os.environ["GROUP_RANK"] == "0"))) == "1"
    first = leads and os.environ["LOCAL_RANK"] == "0"
    store = open_store(init_method, rank == 0, first, timedelta(seconds=timeout_seconds))
    store = PrefixStore(os.environ["TORCHELASTIC_RUN_ID"] + attempt, store)
    if first:
        store.set("first", str(rank))
    rank = (rank - int(store.get("first"))) % size
    heartbeat.set_rank(rank)
    return Rendezvous(store, rank, size, heartbeat, leads)


def open_store(init_method: str, at_address: bool, on_leader: bool, timeout: timedelta) -> Store:
    """Open the store of one attempt, on the rank that hosts it first; a fixed address is the leader's."""
    # Torchrun's port is another one in every attempt, on all machines alike; the attempt's number is not.
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    kind, _, place = init_method.partition("://")
    attempt = f"{port} {os.environ['TORCHELASTIC_RESTART_COUNT'] if os.environ['GROUP_WORLD_SIZE'] == '1' else ''}"
    if kind == "file":
        if not can_be_store(Path(place)):
            raise MachineError(
                f"dist.init_method: {place} can be no file of ranks here; name a new one in a folder that all machines share"
            )
        # It stays, with keys of other attempts and runs.
        store = dist.FileStore(place, -1)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(timeout)
        return PrefixStore(attempt, store)
    if kind == "tcp":
        address, _, port = place.rpartition(":")
        address = address.strip("[]")
        at_address = on_leader
    soon = timeout if kind == "env" else min(timeout, timedelta(seconds=CONNECT_SECONDS))
    try:
        store = dist.TCPStore(address, int(port), is_master=at_address, wait_for_workers=False, timeout=soon)  # pyright: ignore
    except dist.DistError as error:
        if kind == "env":
            raise
        why = str(error).splitlines()[0]
        raise MachineError(f"dist.init_method: {init_method}: {why}; name a free port of the leader, which this machine reaches") from None
    store.set_timeout(timeout)
    return PrefixStore(attempt, store) if kind == "tcp" else store


def can_be_store(path: Path) -> bool:
    """Return True if torch can keep a store in this file: one of its own, or none yet; with any other file it would never end."""
    try:
        with path.open("a+b") as file:
            file.seek(0)
            # It begins with the length of its first key.
            return int.from_bytes(file.read(4), "little") < 1 << 12
    except OSError:
        return False


def init_group(device_type: str, backend: str, info: Rendezvous, timeout_seconds: float) -> Ranks:
    """Initialize the process group."""
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(backend, store=info.store, rank=info.rank, world_size=info.size, timeout=timeout)
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    return Ranks(info.rank, info.size, device, control, info.heartbeat, info.beside_rank_zero)


def shutdown_group(ranks: Ranks) -> None:
    """Barrier, then destroy the group: ranks exit together, so that a failure before can still restart the whole group."""
    ranks.heartbeat.leaving()
    dist.barrier(ranks.control)
    dist.destroy_process_group()
