"""A deterministic simulation of several machines: their own code in threads that run one at a time, with a clock and a store of ours.

A point is a call to the store or a sleep: the only places where the machines affect each other. At each point a plan, or a random
generator, may let another process go first or do a fault; nothing else is left to chance, so a plan or a seed repeats a schedule.
"""

import _thread
import threading
from collections.abc import Callable
from random import Random
from typing import Any

# Sleeps are at least so long: fewer points for the same protocol.
QUANTUM_SECONDS = 1.0
# A process that is preempted goes on later by so much.
PREEMPTED_SECONDS = 0.3


class Killed(BaseException):
    """Unwinds the thread of a process that has gone."""


class Process:
    """One process of a machine: a function in a thread of its own."""

    def __init__(self, world: "World", name: str, body: Callable[["Process"], Any], starts_at: float):
        self.world, self.name, self.wakes_at = world, name, starts_at
        self.alive, self.ended_at, self.result = True, float("inf"), None
        # Its thread takes no further turn, even if it has not quite gone.
        self.took_last_turn = False
        # What a signal does to it at its next point.
        self.signalled: Callable[[], None] | None = None
        # The handler of SIGTERM; without one it ends the process.
        self.on_term: Callable[[], Any] | None = None
        self.told_to_stop_in: str | None = None
        self.clock_offset, self.check_seconds = 0.0, 1.0
        self._turn, self._body = _thread.allocate_lock(), body
        self._turn.acquire()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            self._go_on()
            self.result = self._body(self)
        except Killed:
            pass
        except Exception as error:
            self.world.violations.append(f"{self.name} ended with {error!r}")
        self.alive, self.ended_at, self.took_last_turn = False, self.world.now, True
        self.world.pass_turn(None)

    def _go_on(self) -> None:
        if self.world.over or not self.alive:
            raise Killed
        handle, self.signalled = self.signalled, None
        if handle:
            handle()

    def give_turn(self) -> None:
        self._turn.release()

    def wait_for_turn(self) -> None:
        self._turn.acquire()

    def sleep(self, seconds: float) -> None:
        """Let others run; a signal cuts it short."""
        self.wakes_at = self.world.now + seconds
        self.world.point(self, asleep=True)
        self._go_on()

    def touch_store(self) -> None:
        """A point before every call to the store; a call of a dead process, such as in `finally`, reaches nobody."""
        if not self.alive or self.world.over:
            raise RuntimeError("this process is gone")
        self.world.point(self, asleep=False)
        self._go_on()


class World:
    """The processes, the time, and who is next."""

    def __init__(self, plan: dict[int, Any] | None = None, random: Random | None = None, limit_seconds: float = 3000):
        self.now, self.points, self.over = 0.0, 0, False
        self.processes: list[Process] = []
        self.violations: list[str] = []
        self.log: list[str] = []
        self.act: Callable[[Any, Process], None] = lambda action, process: None
        self._plan, self._random, self._limit = plan or {}, random, limit_seconds
        self._finished = _thread.allocate_lock()
        self._finished.acquire()

    def start(self, name: str, body: Callable[[Process], Any], starts_at: float = 0.0) -> Process:
        self.processes.append(Process(self, name, body, starts_at))
        return self.processes[-1]

    def run(self) -> None:
        """Until all processes have ended, or the limit."""
        self.pass_turn(None)
        self._finished.acquire()
        self.over = True
        for process in self.processes:
            if not process.took_last_turn:
                process.give_turn()
                self._finished.acquire()
            process.thread.join()

    def point(self, process: Process, asleep: bool) -> None:
        """Count a point, do what is planned for it, and hand the turn to whoever is next."""
        self.points += 1
        action = self._plan.get(self.points)
        if action is not None and action != "preempt":
            self.act(action, process)
        if action == "preempt" or (self._random and self._random.random() < 0.05):
            process.wakes_at = max(process.wakes_at, self.now + PREEMPTED_SECONDS)
            asleep = True
        if asleep or not process.alive:
            self.pass_turn(process)

    def pass_turn(self, current: Process | None) -> None:
        """Give the turn to the process that wakes first; `current`, if any, waits until it has it again."""
        following = None if self.over else self._following()
        if following is not None:
            self.now = max(self.now, following.wakes_at)
            if following is current:
                return
            following.give_turn()
        else:
            self._finished.release()
        if current is not None:
            current.wait_for_turn()

    def _following(self) -> Process | None:
        alive = [process for process in self.processes if process.alive]
        if not alive:
            return None
        first = min(alive, key=lambda one: one.wakes_at)
        if first.wakes_at > self._limit:
            self.violations.append(f"still running after {self._limit:.0f} s: {', '.join(one.name for one in alive)}")
            return None
        if self._random:
            return self._random.choice([one for one in alive if one.wakes_at <= max(self.now, first.wakes_at + PREEMPTED_SECONDS)])
        return first


class SimulatedClock:
    """A process's clock; see pipeline.cluster.messages.Clock."""

    def __init__(self, process: Process):
        self._process = process

    def monotonic(self) -> float:
        return self._process.world.now

    def time(self) -> float:
        return 1e9 + self._process.world.now + self._process.clock_offset

    def sleep(self, seconds: float) -> None:
        self._process.sleep(max(seconds, QUANTUM_SECONDS))


class SimulatedServer:
    """What the leader's store holds, until it is lost."""

    def __init__(self, on_set: Callable[[str, bytes], None]):
        self.values: dict[str, bytes] = {}
        self.is_open, self.on_set = True, on_set


class SimulatedStore:
    """One process's connection to the store; see pipeline.cluster.store.KeyValueStore."""

    def __init__(self, server: SimulatedServer, process: Process):
        self._server, self._process = server, process

    def _values(self) -> dict[str, bytes]:
        self._process.touch_store()
        if not self._server.is_open:
            raise RuntimeError("connection reset by peer")
        return self._server.values

    def set(self, key: str, value: str) -> None:
        self._values()[key] = value.encode()
        self._server.on_set(key, value.encode())

    def get(self, key: str) -> bytes:
        return self._values()[key]

    def check(self, keys: list[str]) -> bool:
        values = self._values()
        return all(key in values for key in keys)

    def add(self, key: str, amount: int) -> int:
        values = self._values()
        values[key] = str(int(values.get(key, b"0")) + amount).encode()
        return int(values[key])

    def append(self, key: str, value: str) -> None:
        values = self._values()
        values[key] = values.get(key, b"") + value.encode()
        self._server.on_set(key, values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        values = self._values()
        if values.get(key, b"") == expected.encode():
            values[key] = desired.encode()
        return values.get(key, b"")
