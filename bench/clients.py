"""Many clients at one store, as the workers and ranks of a large job are: how fast a group forms, and what the store's process does."""

import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import psutil

from pipeline.cluster.messages import LEADER
from pipeline.cluster.store import connect, serve
from pipeline.elastic.coordinator import Coordinator
from pipeline.elastic.generations import Member
from pipeline.hardware.network import listen

HOST = "127.0.0.1"
PROCESSES = 8
# A worker whose ranks train looks so often at what it waits for, and sends a heartbeat a second.
LOOK_SECONDS, NAMES = 0.5, 5


def server(clients: int, pipe: Connection) -> None:
    """The leader: the store, and the coordinator of an elastic job."""
    listening = listen(0, HOST)
    port = listening.getsockname()[1]
    store = serve(HOST, port, listening)
    pipe.send(port)
    coordinator = Coordinator(store, clients, clients)
    while not pipe.poll(0.01):
        coordinator.look()


def client_process(number: int, per_process: int, port: int, started: Barrier, pipe: Connection, seconds: float) -> None:
    """Some of the clients, each with a connection and a thread of its own."""
    stores = [connect(HOST, port) for _ in range(per_process)]
    entered: list[float] = []
    asked = [0] * per_process

    def enter(index: int) -> None:
        member = Member(stores[index], f"{LEADER}:{number}.{index}")
        member.ready()
        member.next()
        entered.append(time.monotonic())

    def work(index: int) -> None:
        name, until = f"{number}.{index}", time.monotonic() + seconds
        # Not all at once.
        time.sleep(LOOK_SECONDS * index / per_process)
        while (now := time.monotonic()) < until:
            for one in range(NAMES):
                stores[index].get(f"job/{one}")
            stores[index].put(f"heartbeats/{name}", now)
            # `get` asks whether there is a value, and there is none.
            asked[index] += NAMES + 1
            time.sleep(max(0.0, now + LOOK_SECONDS - time.monotonic()))

    for phase in (enter, work):
        threads = [threading.Thread(target=phase, args=(index,)) for index in range(per_process)]
        started.wait()
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        pipe.send((max(entered), sum(asked)))


def measured(clients: int, seconds: float = 10.0) -> dict[str, float]:
    """Form a group of so many ranks, and then let as many workers look at the store."""
    # torch looks every peer's name up, at both ends; here a server of names may not answer for 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    leader = context.Process(target=server, args=(clients, theirs), daemon=True)
    leader.start()
    port: int = ours.recv()
    started = context.Barrier(PROCESSES + 1)
    pipes = [context.Pipe() for _ in range(PROCESSES)]
    processes = [
        context.Process(target=client_process, args=(number, clients // PROCESSES, port, started, pipe[1], seconds), daemon=True)
        for number, pipe in enumerate(pipes)
    ]
    for one in processes:
        one.start()
    usage = psutil.Process(leader.pid)
    started.wait()
    began_at = time.monotonic()
    formed = max(pipe.recv()[0] for pipe, _ in pipes) - began_at
    started.wait()
    before, began_at = sum(usage.cpu_times()[:2]), time.monotonic()
    operations = sum(pipe.recv()[1] for pipe, _ in pipes)
    elapsed, spent = time.monotonic() - began_at, sum(usage.cpu_times()[:2]) - before
    ours.send("end")
    for one in (*processes, leader):
        one.join(30)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return {
        "clients": clients,
        "seconds to form a group": formed,
        "operations a second": operations / elapsed,
        "of a core": spent / elapsed,
    }


if __name__ == "__main__":
    for count in map(int, sys.argv[1:] or ["1024"]):
        print(json.dumps(measured(count)), flush=True)
