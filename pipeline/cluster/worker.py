"""A worker: takes part in a leader's jobs, one after the other, and leaves with the leader's exit code."""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from pydantic import ValidationError

from pipeline.cluster.messages import MEMBERS, Clock, JobOffer, Reply
from pipeline.cluster.readiness import gpus_of_ranks
from pipeline.cluster.store import ClusterStore
from pipeline.config import MachineError, PeerError
from pipeline.files import describe as describe_os_error
from pipeline.job import Job
from pipeline.launch.failures import FINAL_EXITS, Failure, LaunchResult
from pipeline.launch.outcome import describe
from pipeline.launch.restarts import RestartPolicy
from pipeline.launch.supervisor import Observer
from pipeline.runs.status import StopRequested
from pipeline.timeouts import STORM_SECONDS, ending_seconds

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1
# Returns the job with this machine's paths, and the reason if it cannot take part.
Check = Callable[[JobOffer], tuple[Job, str | None]]
RunRanks = Callable[[JobOffer, Job, Observer], LaunchResult]


class Worker:
    """One machine at a leader's disposal."""

    def __init__(self, name: str, leader: str, store: ClusterStore, check: Check, run_ranks: RunRanks, clock: Clock = time):
        self._name, self._leader, self._store = name, leader, store
        self._check, self._run_ranks, self._clock = check, run_ranks, clock
        self.stopped, self._stopped_at, self._busy = False, inf, False
        self._num_offers, self._offer_id, self._heartbeat_at, self._waits_until = 0, "", 0.0, 0.0
        # Why this machine cannot go on with a job whose others can.
        self._gave_up = ""

    def work(self) -> int:
        """Serve one job after the other until the leader ends; returns its exit code."""
        self._store.append("workers", self._name)
        log.info("waiting for a job")
        try:
            while True:
                verdict = self._store.get("verdict")
                if verdict is not None:
                    log.info("the leader has ended with %d", verdict)
                    self._store.append("goodbyes", self._name)
                    return int(verdict)
                self.send_heartbeat()
                self._serve_new_offers()
                self._clock.sleep(0.2)
        except StopRequested:
            # So that nobody waits for this worker.
            with contextlib.suppress(PeerError):
                self._store.append("goodbyes", self._name)
                self._store.append(f"{self._offer_id}/leaving", self._name)
            raise

    def stop(self) -> None:
        """Handle a request to stop: StopRequested where this machine only waits, or was asked before; else the job is to stop first."""
        if not self._busy:
            raise StopRequested("stopped on request while it waited for a job")
        if self._clock.monotonic() > self._stopped_at + STORM_SECONDS:
            raise StopRequested("stopped by a second signal, before the leader had ended the job")
        self._note_stop()

    def _note_stop(self) -> None:
        self.stopped, self._stopped_at = True, min(self._stopped_at, self._clock.monotonic())

    def _serve_new_offers(self) -> None:
        if self.stopped:
            if self._clock.monotonic() > self._waits_until:
                raise PeerError(f"{self._leader}: this worker was stopped, and its leader did not end")
            return
        for value in self._store.since("offers", self._num_offers) if self._has_new_offer() else ():
            self._num_offers += 1
            if not self.stopped:
                self._consider(value)

    def _consider(self, value: dict[str, Any]) -> None:
        try:
            offer = JobOffer.model_validate(value)
        except ValidationError:
            log.info("cannot take part: this is another version of the code than the leader's")
            self._reply(str(value["id"]), "has another version of the code")
        else:
            self._serve(offer)

    def _reply(self, offer_id: str, refusal: str | None, gpus: Sequence[str] = ()) -> None:
        reply = Reply(worker=self._name, host=socket.gethostname(), leader=self._leader, refusal=refusal, gpus=list(gpus))
        self._store.append(f"{offer_id}/replies", reply.model_dump())

    def _serve(self, offer: JobOffer) -> None:
        """Stay with a job until it ends: as a member from the beginning, or as a spare until another worker is lost."""
        if self._has_ended(offer):
            return
        self._offer_id, self._gave_up = offer.id, ""
        job, refusal = self._check(offer)
        self._heartbeat_at = -inf
        self.send_heartbeat()
        ranks = offer.config.dist.world_size // offer.config.dist.nodes
        self._reply(offer.id, refusal, [] if refusal else gpus_of_ranks(offer.backend, ranks))
        if refusal:
            log.info("cannot take part: %s", refusal)
        announced = bool(refusal)
        while not self._has_ended(offer):
            refusal = refusal or self._gave_up
            if self.stopped:
                return
            if not refusal and self._is_member(offer):
                log.info("%s %s: run %s", offer.stage, offer.config.model.name, offer.run)
                self._busy = True
                if self._take_part(offer, job):
                    self._wait_for_end(offer)
                self._busy = False
            elif not announced and self._store.get(f"{offer.id}/{MEMBERS}"):
                log.info("%s %s: enough others take part; waiting as a spare", offer.stage, offer.config.model.name)
                announced = True
            if not refusal:
                self.send_heartbeat()
            self._clock.sleep(0.1)

    def _take_part(self, offer: JobOffer, job: Job) -> bool:
        """Run the ranks here; returns False if they were ended because others took their place: this worker may be needed again."""
        reporter = _Reporter(self, offer)
        try:
            result = self._run_ranks(offer, job, reporter)
        except OSError as error:
            self.report(offer, Failure(None, MachineError.exit_code, describe_os_error(error, "starting the ranks"), 0))
            raise
        self._waits_until = self._clock.monotonic() + ending_seconds(offer.config.dist.grace_seconds)
        if result.stopped_by is not None:
            self._note_stop()
        if self.stopped:
            # Ranks that were not yet in their loop, or not any more, could not agree on it.
            with contextlib.suppress(PeerError):
                self._store.append(f"{offer.id}/leaving", self._name)
            if offer.elastic and not self._has_ended(offer):
                raise StopRequested("left on request")
        return not reporter.was_over

    def _wait_for_end(self, offer: JobOffer) -> None:
        """Wait, with the ranks here done, until the leader ends the job or goes on without this worker."""
        while self._clock.monotonic() < self._waits_until and not self._has_ended(offer) and self._is_member(offer):
            self.send_heartbeat()
            self._clock.sleep(0.2)

    def _has_ended(self, offer: JobOffer) -> bool:
        """Return whether the leader has ended this job or its whole command, or is at its next job."""
        ended = (f"{offer.id}/exit-code", "verdict")
        return any(self._store.get(name) is not None for name in ended) or self._has_new_offer()

    def _has_new_offer(self) -> bool:
        return (self._store.get("num-offers") or 0) > self._num_offers

    def _is_member(self, offer: JobOffer) -> bool:
        return self._name in (self._store.get(f"{offer.id}/{MEMBERS}") or [])

    def give_up(self, offer: JobOffer, why: str) -> None:
        """Leave a job to the others, whatever the leader thinks of it."""
        log.info("cannot go on: %s", why)
        self._gave_up = why
        with contextlib.suppress(PeerError):
            self._reply(offer.id, why)

    def is_over(self, offer: JobOffer) -> bool:
        """Return whether the ranks here have nothing more to do: the job has ended, others do it, or the leader is gone."""
        try:
            return self._has_ended(offer) or not self._is_member(offer)
        except PeerError:
            return True

    def send_heartbeat(self) -> None:
        """Once a second, let the leader know that this worker is alive, and how late it is here."""
        if self._clock.monotonic() - self._heartbeat_at > HEARTBEAT_SECONDS:
            self._heartbeat_at = self._clock.monotonic()
            with contextlib.suppress(PeerError):
                self._store.put(f"heartbeats/{self._name}", self._clock.time())

    def report(self, offer: JobOffer, failure: Failure) -> None:
        """Report a failure of a rank here to the leader."""
        log.info("%s", describe(failure, offer.config))
        values = {name: value for name, value in asdict(failure).items() if name != "at"} | {"host": socket.gethostname()}
        with contextlib.suppress(PeerError):
            self._store.append(f"{offer.id}/failures", values)


class _Reporter:
    """The supervisor's observer on a worker: reports to the leader, who decides."""

    def __init__(self, worker: Worker, offer: JobOffer):
        self._worker, self._offer, self.was_over = worker, offer, False
        self._patience, self._gave_up = RestartPolicy(offer.config.dist.world_size), False

    def failed(self, failure: Failure) -> str | None:
        """Report it; of ranks that the others can do without, only what is started again."""
        final = failure.exit_code in FINAL_EXITS and not failure.waiting
        if self._offer.elastic and (final or self._patience.reason_to_stop(failure)):
            self._gave_up = True
            self._worker.give_up(self._offer, describe(failure, self._offer.config))
        else:
            self._worker.report(self._offer, failure)

    def say(self, text: str) -> None:
        """Log it here."""
        log.info("%s", text)

    def poll(self) -> list[Failure]:
        """Send a heartbeat; returns nothing, as the leader reports no failures to workers."""
        self._worker.send_heartbeat()
        return []

    def stop_requested(self) -> bool:
        """Return True if this worker was told to stop before its ranks could be; the leader stops its own, and they agree with these."""
        return self._worker.stopped

    def is_done(self, idle_seconds: float) -> bool:
        """Return whether torchrun is to be ended here."""
        self.was_over = self._gave_up or self._worker.is_over(self._offer)
        return self.was_over
