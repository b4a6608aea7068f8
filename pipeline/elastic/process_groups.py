"""The way into a generation's process group, and out of it."""

import contextlib
import os
import socket
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pipeline.collectives import watch
from pipeline.elastic.generations import LEADER, Generation, machine_of
from pipeline.hardware.network import sockets, split
from pipeline.heartbeat import Heartbeat
from pipeline.job import Job
from pipeline.ranks import Ranks, Rendezvous, init_group
from pipeline.timeouts import collective_seconds, forming_seconds

# The number of a group that is none.
OUTSIDE = -1
# gloo waits so many times its timeout for a connection: one that has died meanwhile never makes it.
CONNECTING_TIMES = 5


class LostPeer(RuntimeError):
    """A rank was lost while a group formed."""


class ProcessGroups:
    """Enters one group after the other, under one name."""

    def __init__(self, job: Job, name: str, store: str, heartbeat: Heartbeat):
        self._job, self._name, self._heartbeat = job, name, heartbeat
        host, port = split(store)
        store_of_all = dist.TCPStore(host, port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
        self._store = PrefixStore(os.environ["TORCHELASTIC_RUN_ID"], store_of_all)
        # Who shuts the sockets of a group from another thread does not shut those of the next one.
        self._lock, self.number = threading.Lock(), OUTSIDE
        self.in_vain = watch()
        # Sockets that are not the group's, by the kernel's names.
        self._others: set[str] = set()
        # This rank, before it is in a group, and in each of them.
        self.ranks = Ranks(0, 1, torch.device(job.device), None, heartbeat)  # pyright: ignore[reportArgumentType]

    @property
    def on_leader(self) -> bool:
        """True if this rank runs beside the journal and the checkpoints."""
        return machine_of(self._name) == LEADER

    def enter(self, generation: Generation) -> None:
        """Enter a generation's group; LostPeer if that cannot be."""
        store = PrefixStore(f"group/{generation.number}", self._store)
        rank, size = generation.members.index(self._name), len(generation.members)
        seconds = forming_seconds(size)
        # By itself it would wait five minutes for the address of a lost rank.
        store.set_timeout(timedelta(seconds=seconds))
        # torch numbers groups, also one that did not come about here; its number is part of the keys under which ranks meet.
        dist.distributed_c10d._world.group_count = 0  # pyright: ignore[reportPrivateUsage]
        with self._lock:
            self._others, self.number = set(sockets().values()), generation.number
            self.in_vain.clear()
        info = Rendezvous(store, rank, size, self._heartbeat, self.on_leader)
        try:
            group = init_group(self._job.device, self._job.backend, info, seconds / CONNECTING_TIMES)
        except RuntimeError as error:
            raise LostPeer(str(error)) from error
        timeout = timedelta(seconds=collective_seconds(self._job.config.dist.timeout_seconds))
        # All but single sends and receives, which keep the one from above: `ddp` with `flat` has none.
        for one in {dist.group.WORLD, group.control}:
            dist.set_timeout(timeout, one)  # pyright: ignore
        store.set_timeout(timeout)
        self._heartbeat.set_rank(rank)
        self.ranks.become(group)

    def leave(self) -> list[object]:
        """Leave the group without a word to the others, whose collectives fail; returns what is left of it."""
        found = list[object](dist.distributed_c10d._world.pg_map)  # pyright: ignore[reportPrivateUsage]
        self.shut(self.number)
        with self._lock:
            self.number = OUTSIDE
        if dist.is_initialized():
            dist.destroy_process_group()
        self.ranks.become(Ranks(0, 1, self.ranks.device, None, self._heartbeat))  # pyright: ignore[reportArgumentType]
        return found

    def shut(self, number: int) -> None:
        """Let all collectives of a generation's group fail, from whatever thread; nothing, once another generation is entered."""
        with self._lock:
            for descriptor, name in sockets().items() if number == self.number else ():
                if name not in self._others:
                    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                        # The number may be another's by now; and gloo ends the process if it cannot listen any more.
                        same = str(Path(f"/proc/self/fd/{connection.fileno()}").readlink()) == name
                        if same and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            connection.shutdown(socket.SHUT_RDWR)
