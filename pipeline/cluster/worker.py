"""A worker: this machine takes part in a leader's jobs and exits with the leader's exit code."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict

from pydantic import ValidationError

from pipeline.cluster.membership import Answer, Call, bitwise_requirements
from pipeline.cluster.store import ClusterStore
from pipeline.config import Config, ConfigError, DataError, MachineError, PeerError
from pipeline.data import store
from pipeline.files import Paths
from pipeline.hardware import machine
from pipeline.hardware.network import interface, own_address, reach
from pipeline.hardware.placement import resolve
from pipeline.job import Job
from pipeline.launch import supervisor
from pipeline.launch.failures import Failure
from pipeline.launch.node import Node
from pipeline.launch.outcome import describe

log = logging.getLogger(__name__)

MODULES = {"train": "pipeline.training.train_rank", "evaluate": "pipeline.training.evaluate_rank"}
# How long a worker waits for its leader to begin.
LEADER_SECONDS = 600
# How long it waits, with nothing left to do in a job, for the leader to end it.
ENDING_SECONDS = 90


class Worker:
    """This machine, in a leader's meeting."""

    def __init__(self, paths: Paths, host: str, port: int, prepare: Callable[[Config, Paths], int]):
        self._paths, self._host, self._port, self._prepare_data = paths, host, port, prepare
        where = f"{host}:{port}"
        log.info("joining the leader at %s", where)
        self._leader_address = reach(
            host, port, LEADER_SECONDS, lambda why: log.info("waiting for it, for %d s at most (%s)", LEADER_SECONDS, why)
        )
        self._meeting = ClusterStore(host, port)
        # A container that was started again is the same worker.
        self._name = f"{socket.gethostname()}/{os.getpid()}"
        self._meeting.append("workers", self._name)
        log.info("joined %s; waiting for a job", where)
        self.stopped = False
        self._count, self._beat, self._beat_at = 0, 0, 0.0

    def work(self) -> int:
        """Serve one job after the other until the leader ends."""
        while True:
            verdict = self._meeting.get("verdict")
            if verdict is not None:
                log.info("the leader has ended with %d", verdict)
                self._meeting.append("goodbyes", self._name)
                # A restart policy is for workers that die: after a verdict there is nothing to come back to.
                return 0 if os.environ.get("LOCKSTEP_RESTART", "no") != "no" else int(verdict)
            for value in self._meeting.since("calls", self._count):
                self._count += 1
                try:
                    call = Call.model_validate(value)
                except ValidationError:
                    log.info("cannot take part: this is another version of the code than the leader's")
                    self._answer(str(value["id"]), "has another version of the code")
                else:
                    self._serve(call)
            time.sleep(0.2)

    def _answer(self, call: str, complaint: str | None) -> None:
        own = {"worker": self._name, "host": socket.gethostname(), "leader": self._leader_address}
        answer = Answer.model_validate(own | {"clock": time.time(), "complaint": complaint})
        self._meeting.append(f"{call}/answers", answer.model_dump())

    def _serve(self, call: Call) -> None:
        """Take part in a job from its call to its end; as a spare, only when another worker is lost."""
        if self._over(call):
            return
        job, complaint = self._prepared(call)
        self._answer(call.id, complaint)
        if complaint:
            log.info("cannot take part: %s", complaint)
        told = bool(complaint)
        while not self._over(call):
            if self.stopped:
                raise PeerError(f"{self._host}: the leader did not end the job in {ENDING_SECONDS} s")
            if not complaint and self._admitted(call):
                log.info("%s %s: run %s", call.stage, call.config.model.name, call.run)
                self._run_ranks(call, job)
                self._wait(call)
            elif not told and self._meeting.get(f"{call.id}/crew"):
                log.info("%s %s: enough others take part; waiting as a spare", call.stage, call.config.model.name)
                told = True
            if not complaint:
                self.beat(call)
            time.sleep(0.1)

    def _prepared(self, call: Call) -> tuple[Job, str | None]:
        """The job with this machine's files, its data prepared here where they are not; what is wrong, if anything is."""
        job = Job(
            config=call.config,
            device=call.device,
            backend=call.backend,
            precision=call.precision,
            prepared=self._paths.prepared,
            run=self._paths.runs / call.run,
        )
        try:
            placed = resolve(call.config, machine.detect())
            self._prepare(call)
            own = bitwise_requirements(job) | {"device and backend": f"{placed.device}, {placed.backend}"}
        except (ConfigError, DataError, MachineError, OSError) as error:
            return job, str(error)
        different = [
            f"{name}: {own.get(name)!r} here, {value!r} with the leader"
            for name, value in (call.bitwise_requirements | {"device and backend": f"{call.device}, {call.backend}"}).items()
            if own.get(name) != value
        ]
        return job, f"would compute other bits: {'; '.join(different)}" if different else None

    def _prepare(self, call: Call) -> None:
        """See that the data are those of the leader; without a common folder they are prepared anew, which gives the same."""
        with contextlib.suppress(DataError):
            if store.read_manifest(self._paths.prepared).digest == call.bitwise_requirements["data"]:
                manifest = store.read_manifest(self._paths.prepared)
                store.verify(self._paths.prepared, manifest, tuple(manifest.counts))
                return
        log.info("preparing %s", call.config.data.name)
        self._prepare_data(call.config, self._paths)

    def _run_ranks(self, call: Call, job: Job) -> None:
        address = own_address(self._host, self._port)
        dist = call.config.dist
        node = Node(
            ranks=dist.world_size // dist.nodes,
            threads=dist.threads_per_rank,
            nodes=dist.nodes,
            leads=False,
            job_id=call.id,
            endpoint=f"{self._host}:{self._port}",
            address=address,
            interface=interface(address) or "lo",
        )
        watch = supervisor.run(MODULES[call.stage], job, node, None, _Observer(self, call))
        if watch.stopped_by is not None:
            self.stopped = True
            # Ranks that were not yet in their loop, or not any more, could not agree on it.
            with contextlib.suppress(PeerError):
                self._meeting.put(f"{call.id}/leaving", self._name)

    def _wait(self, call: Call) -> None:
        """The ranks here are done; the leader ends the job, or it is begun again."""
        until = time.monotonic() + ENDING_SECONDS
        while time.monotonic() < until and not self._over(call) and self._admitted(call):
            self.beat(call)
            time.sleep(0.2)

    def _over(self, call: Call) -> bool:
        """Whether a job has ended, in its leader's words, with all of the leader's work, or because the leader is at another one."""
        ended = (f"{call.id}/over", "verdict", f"calls/{self._count + 1}")
        return any(self._meeting.get(name) is not None for name in ended)

    def _admitted(self, call: Call) -> bool:
        return self._name in (self._meeting.get(f"{call.id}/crew") or [])

    def over(self, call: Call) -> bool:
        """Whether there is nothing more to do for a job, or others do it; also where the leader is gone."""
        try:
            return self._over(call) or not self._admitted(call)
        except PeerError:
            return True

    def beat(self, call: Call) -> None:
        """Now and then, let the leader know that this worker is alive."""
        if time.monotonic() - self._beat_at > 1:
            self._beat, self._beat_at = self._beat + 1, time.monotonic()
            with contextlib.suppress(PeerError):
                self._meeting.put(f"{call.id}/beats/{self._name}", self._beat)

    def tell(self, call: Call, failure: Failure) -> None:
        """Let the leader know of a failure here."""
        log.info("%s", describe(failure, call.config))
        told = {name: value for name, value in asdict(failure).items() if name != "at"} | {"host": socket.gethostname()}
        with contextlib.suppress(PeerError):
            self._meeting.append(f"{call.id}/failures", told)


class _Observer:
    """Passes on what happens to this machine's ranks."""

    def __init__(self, worker: Worker, call: Call):
        self._worker, self._call = worker, call

    def failed(self, failure: Failure) -> str | None:
        """Tell the leader, who decides."""
        self._worker.tell(self._call, failure)

    def say(self, text: str) -> None:
        """Say it here."""
        log.info("%s", text)

    def heard(self) -> list[Failure]:
        """The leader is told, and tells nothing."""
        self._worker.beat(self._call)
        return []

    def asked_to_stop(self) -> bool:
        """The leader stops its own ranks, and they tell these."""
        return False

    def over(self, idle_seconds: float) -> bool:
        """Whether the leader has ended the job, does without this worker, or is gone."""
        return self._worker.over(self._call)
