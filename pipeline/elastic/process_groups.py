"""The way into a generation's process group, and out of it."""

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from pipeline.elastic.generations import Generation
from pipeline.hardware.network import split
from pipeline.heartbeat import Heartbeat
from pipeline.job import Job
from pipeline.ranks import Ranks, Rendezvous, init_group
from pipeline.timeouts import FORMING_SECONDS, collective_seconds


class LostPeer(RuntimeError):
    """A rank was lost while a group formed."""


class ProcessGroups:
    """Enters one group after the other, under one name."""

    def __init__(self, job: Job, name: str, store: str, heartbeat: Heartbeat):
        self._job, self._name, self._heartbeat = job, name, heartbeat
        host, port = split(store)
        self._store = dist.TCPStore(host, port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
        # Sockets that are not the group's, by the kernel's names.
        self._others: set[str] = set()
        # This rank, before it is in a group, and in each of them.
        self.ranks = Ranks(0, 1, torch.device(job.device), None, heartbeat)  # pyright: ignore[reportArgumentType]

    def enter(self, generation: Generation) -> None:
        """Enter a generation's group; LostPeer if that cannot be."""
        store = PrefixStore(f"group/{generation.number}", self._store)
        rank, size = generation.members.index(self._name), len(generation.members)
        # torch numbers groups, also one that did not come about here; its number is part of the keys under which ranks meet.
        dist.distributed_c10d._world.group_count = 0  # pyright: ignore[reportPrivateUsage]
        self._others = set(sockets().values())
        try:
            group = init_group(self._job.device, self._job.backend, Rendezvous(store, rank, size, self._heartbeat), FORMING_SECONDS)
        except RuntimeError as error:
            raise LostPeer(str(error)) from error
        timeout = timedelta(seconds=collective_seconds(self._job.config.dist.timeout_seconds))
        for one in {dist.group.WORLD, group.control}:
            dist.set_timeout(timeout, one)  # pyright: ignore
        self._heartbeat.set_rank(rank)
        self.ranks.become(group)

    def leave(self) -> list[object]:
        """Leave the group without a word to the others, whose collectives fail; returns what is left of it."""
        found = list[object](dist.distributed_c10d._world.pg_map)  # pyright: ignore[reportPrivateUsage]
        for descriptor, name in sockets().items():
            if name not in self._others:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    # gloo ends the process if it cannot listen any more.
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)
        if dist.is_initialized():
            dist.destroy_process_group()
        self.ranks.become(Ranks(0, 1, self.ranks.device, None, self._heartbeat))  # pyright: ignore[reportArgumentType]
        return found


def sockets() -> dict[int, str]:
    """Return this process's sockets, by their descriptors; a name is never given twice, as a descriptor is."""
    found: dict[int, str] = {}
    for one in Path("/proc/self/fd").iterdir():
        # It may be closed by now.
        with contextlib.suppress(OSError):
            if (name := str(one.readlink())).startswith("socket:"):
                found[int(one.name)] = name
    return found
