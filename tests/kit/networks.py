"""Two machines' worth of network on one: namespaces joined by a link of ours, which drops, loses or delays what it carries.

The link is a program between two TUN devices, as many kernels have no `tc netem`. What it drops is gone without RST or ICMP.
"""

import fcntl
import heapq
import itertools
import os
import select
import struct
import subprocess
import threading
import time
from pathlib import Path
from random import Random
from types import TracebackType
from typing import ClassVar

import pytest

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_BYTES = 1 << 16


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Link:
    """Namespaces `a` and `b`, at 10.211.0.1 and 10.211.0.2; everything passes until an attribute is set. `a` may be this one here."""

    addresses: ClassVar = {"a": "10.211.0.1", "b": "10.211.0.2"}

    def __init__(self, a_is_here: bool = False) -> None:
        if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
            pytest.skip("only root can make network namespaces, and only with /dev/net/tun")
        self.drops, self.loss, self.delay_seconds = False, 0.0, 0.0
        self.carried = self.dropped = 0
        self._random, self._stopped = Random(0), threading.Event()
        self._namespaces = {side: f"lockstep-{os.getpid()}-{side}" for side in self.addresses if not (a_is_here and side == "a")}
        self._devices: dict[int, int] = {}
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> "Link":
        try:
            ends = [self._make(side) for side in self.addresses]
        except subprocess.CalledProcessError as error:
            self._remove()
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        self._devices = {ends[0]: ends[1], ends[1]: ends[0]}
        self._thread.start()
        return self

    def _make(self, side: str) -> int:
        """Make one end of the link, in its namespace; returns the descriptor of its device."""
        device, namespace = f"ls{os.getpid()}{side}", self._namespaces.get(side)
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
        where: tuple[str, ...] = ()
        if namespace:
            ip("netns", "add", namespace)
            ip("link", "set", device, "netns", namespace)
            where = ("-n", namespace)
            ip(*where, "link", "set", "lo", "up")
        ip(*where, "addr", "add", f"{self.addresses[side]}/24", "dev", device)
        ip(*where, "link", "set", device, "up")
        return descriptor

    def _carry(self) -> None:
        on_the_way: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while not self._stopped.is_set():
            now = time.monotonic()
            while on_the_way and on_the_way[0][0] <= now:
                _, _, end, packet = heapq.heappop(on_the_way)
                os.write(end, packet)
                self.carried += 1
            wait_seconds = min(0.1, on_the_way[0][0] - now) if on_the_way else 0.1
            for end in select.select(list(self._devices), [], [], wait_seconds)[0]:
                packet = os.read(end, PACKET_BYTES)
                if self.drops or self._random.random() < self.loss:
                    self.dropped += 1
                else:
                    heapq.heappush(on_the_way, (time.monotonic() + self.delay_seconds, next(numbers), self._devices[end], packet))

    def limit(self, rate: str) -> None:
        """Carry no more than this, such as 10mbit, either way from now on."""
        for side in self.addresses:
            shape = (
                "tc",
                "qdisc",
                "add",
                "dev",
                f"ls{os.getpid()}{side}",
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "32kbit",
                "latency",
                "400ms",
            )
            shaped = subprocess.run([*self.within(side), *shape], capture_output=True, text=True)
            if shaped.returncode:
                pytest.skip(f"this kernel cannot limit a link: {shaped.stderr.strip()}")

    def within(self, side: str) -> tuple[str, ...]:
        """What a command is to be started with."""
        return ("ip", "netns", "exec", self._namespaces[side]) if side in self._namespaces else ()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()
        for descriptor in self._devices:
            os.close(descriptor)
        self._remove()

    def _remove(self) -> None:
        for namespace in self._namespaces.values():
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
