"""torchrun's agent, which starts a lost rank again and leaves the others running: `python -m pipeline.elastic.agent`."""

# pyright: reportIncompatibleVariableOverride=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import contextlib
import itertools
import os
import select
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from pipeline import job as jobs
from pipeline.cluster.store import ClusterStore, connect, serve
from pipeline.config import PeerError
from pipeline.elastic.coordinator import Coordinator
from pipeline.elastic.generations import (
    ADDRESSES_TOGETHER,
    DONE,
    HEARTBEAT_SECONDS,
    INCARNATION,
    LEADER,
    MACHINE,
    STORE,
    heartbeat_of,
    lost,
    name_of,
)
from pipeline.hardware.network import listen, split
from pipeline.launch.agent import Agent, main, report
from pipeline.timeouts import ENDING_SECONDS

HOST = "127.0.0.1"
# How often to look for ranks that are ready; that one is lost is known at once. Each look takes the ranks' time.
IDLE_SECONDS, BUSY_SECONDS = 0.5, 0.01
# How many looks after a change are busy ones.
BUSY_LOOKS = 500


class ElasticAgent(Agent):
    """Keeps this machine's ranks running, one by one; the leader's also announces who makes up the group."""

    def run(self, *arguments: Any) -> RunResult:
        """Run as torchrun's agent does, and end what runs beside it."""
        self._over, self._coordinating = os.eventfd(0), None
        try:
            return super().run(*arguments)  # pyright: ignore[reportReturnType]
        finally:
            os.eventfd_write(self._over, 1)
            if self._coordinating:
                self._coordinating.join(ENDING_SECONDS)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        job = spec.rdzv_handler.get_run_id()
        if STORE not in os.environ:
            listening = listen(0, HOST)
            port = listening.getsockname()[1]
            os.environ[STORE] = f"{HOST}:{port}"
            # Nobody else's: it ends with this process.
            self._served = serve(HOST, port, listening)
        self._generations = connect(*split(os.environ[STORE]), job)
        # Another agent of this machine and job may have been before.
        os.environ[INCARNATION] = self._incarnation = uuid.uuid4().hex[:8]
        os.environ |= ADDRESSES_TOGETHER
        self._watched: dict[int, str] = {}
        self._num_lost = 0
        pids = super()._start_workers(worker_group)
        for local, pid in pids.items():
            self._watch(pid, name_of(os.environ | {"LOCAL_RANK": str(local)}))
        machine = os.environ.get(MACHINE, LEADER)
        dist = jobs.read(Path(spec.args[-1])).config.dist
        # More ranks than lanes have nothing to compute.
        coordinator = Coordinator(self._generations, dist.world_size, dist.pieces, say=_say) if machine == LEADER else None
        self._coordinating = threading.Thread(target=self._coordinate, args=(coordinator, self._generations, machine), daemon=True)
        self._coordinating.start()
        return pids

    def _watch(self, pid: int, name: str) -> None:
        try:
            self._watched[os.pidfd_open(pid)] = name
        except ProcessLookupError:
            lost(self._generations, name)

    def _coordinate(self, coordinator: Coordinator | None, store: ClusterStore, machine: str) -> None:
        """Tell which ranks are lost, and announce generations, until the agent ends: also while ranks save and stop."""
        busy, seconds = BUSY_LOOKS, IDLE_SECONDS if coordinator else HEARTBEAT_SECONDS
        # Where the store is gone, this machine is about to be told to stop.
        with contextlib.suppress(PeerError):
            for number in itertools.count():
                soon = BUSY_SECONDS if busy and coordinator else seconds
                ended, _, _ = select.select([self._over, *self._watched], [], [], soon)
                if self._over in ended:
                    return
                for descriptor in ended:
                    lost(store, self._watched.pop(descriptor))
                    os.close(descriptor)
                if coordinator:
                    busy = BUSY_LOOKS if coordinator.look() or ended else max(busy - 1, 0)
                else:
                    store.put(heartbeat_of(machine), [self._incarnation, number])

    def _is_done(self) -> bool:
        try:
            return bool(self._generations.get(DONE))
        except PeerError:
            return True

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        running = self._pcontext.subprocess_handlers
        codes = {local: handler.proc.poll() for local, handler in running.items()}
        over = any(code is not None for code in codes.values()) and self._is_done()
        for local, code in codes.items():
            # Also one that was told to stop by itself, before it was in a group.
            if code is not None and not over:
                self._start_again(worker_group, local, code)
        if over and all(code is not None for code in codes.values()):
            return RunResult(state=WorkerState.SUCCEEDED, return_values={one.global_rank: None for one in worker_group.workers})
        return RunResult(state=WorkerState.HEALTHY)

    def _start_again(self, worker_group: WorkerGroup, local: int, code: int) -> None:
        """Start a lost rank again; what it has left is kept."""
        context, folder = self._pcontext, Path(self._logs.folder)
        assert context is not None and isinstance(context.entrypoint, str)
        kept = folder / f"lost_{self._num_lost}"
        self._num_lost += 1
        kept.mkdir()
        (folder / str(local)).rename(kept / str(local))
        (folder / str(local)).mkdir()
        # Each has a cause of its own.
        report("failed", attempt=self._num_lost, exit_codes={local: code}, folder=str(kept))
        context.envs[local][INCARNATION] = f"{self._incarnation}.{self._num_lost}"
        context.subprocess_handlers[local] = get_subprocess_handler(
            entrypoint=context.entrypoint,
            args=context.args[local],
            env=context.envs[local],
            stdout=context.stdouts[local],
            stderr=context.stderrs[local],
            local_rank_id=local,
        )
        pid = context.subprocess_handlers[local].proc.pid
        worker_group.workers[local].id = pid
        self._watch(pid, name_of(os.environ | context.envs[local]))
        # What ends the job later has another cause.
        report("started", attempt=self._logs.attempt, folder=self._logs.folder)


def _say(text: str) -> None:
    report("said", text=text)


if __name__ == "__main__":
    sys.exit(main(ElasticAgent))
