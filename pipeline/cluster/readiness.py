"""Whether this machine can take part in an offered job with the same bits as the leader, its data prepared where they are missing."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.cluster.messages import JobOffer
from pipeline.config import Config, ConfigError, DataError, MachineError, digest
from pipeline.data import store
from pipeline.files import Paths, locked
from pipeline.hardware import machine
from pipeline.hardware.placement import resolve
from pipeline.job import Job, first_weights
from pipeline.runs.identity import versions
from pipeline.runs.source import EVALUATE, TRAIN, source_digests

log = logging.getLogger(__name__)

FIRST_WEIGHTS = "first weights"
# Prepares the data of a configuration in a folder.
PrepareData = Callable[[Config, Paths, Path], int]


def bitwise_requirements(job: Job) -> dict[str, str]:
    """Return what must be equal on all machines of a job, or their bits differ."""
    here = machine.detect()
    kind = here.gpus[0] if job.device == "cuda" and here.gpus else here.cpu
    computes = versions(job.config, job.device, job.backend)
    code = digest(source_digests(job.config, TRAIN, EVALUATE))
    first = {FIRST_WEIGHTS: job.first_weights.sha256} if job.first_weights else {}
    return computes | first | {"code": code, "device": kind, "data": store.read_manifest(job.prepared).digest}


def gpus_of_ranks(backend: str, ranks: int) -> list[str]:
    """Return the UUIDs of the GPUs that so many ranks compute on here, which nccl wants for itself; gloo shares them."""
    return list(machine.detect().uuids[:ranks]) if backend == "nccl" else []


class Readiness:
    """Checks job offers against this machine and its checkout."""

    def __init__(self, paths: Paths, prepare: PrepareData):
        self._paths, self._prepare = paths, prepare

    def check(self, offer: JobOffer) -> tuple[Job, str | None]:
        """Return the job with this machine's paths, and the reason if it cannot take part."""
        job = Job(
            config=offer.config,
            device=offer.device,
            backend=offer.backend,
            precision=offer.precision,
            prepared=self._paths.prepared,
            run=self._paths.runs / offer.run,
            until=offer.until,
        )
        try:
            placed = resolve(offer.config, machine.detect())
            found: dict[str, Any] = {"prepared": self._prepared(offer)}
            if FIRST_WEIGHTS in offer.bitwise_requirements:
                found["first_weights"] = first_weights(offer.config, self._paths.root)
            job = job.model_copy(update=found)
            own = bitwise_requirements(job) | {"device and backend": f"{placed.device}, {placed.backend}"}
            if offer.elastic and job.why_not_elastic:
                return job, f"dist.elastic: {job.why_not_elastic}"
        except (ConfigError, DataError, MachineError, OSError) as error:
            return job, str(error)
        different = [
            f"{name}: {own.get(name)!r} here, {value!r} with the leader"
            for name, value in (offer.bitwise_requirements | {"device and backend": f"{offer.device}, {offer.backend}"}).items()
            if own.get(name) != value
        ]
        return job, f"would compute other bits: {'; '.join(different)}" if different else None

    def _prepared(self, offer: JobOffer) -> Path:
        """Return a folder with the leader's data: the checkout's own where they are equal, else a worker's, filled where it is empty.

        The checkout's own is an output of DVC's and never written to: with `lead dvc exp run` the leader's may be others.
        """
        digest = offer.bitwise_requirements["data"]
        folder = self._paths.home / "data" / "by-digest" / digest
        if _holds(self._paths.prepared, digest):
            return self._paths.prepared
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Other workers of this checkout wait for the first one.
        with locked(folder.with_name(f".{digest}.lock")):
            if not _holds(folder, digest):
                log.info("preparing %s", offer.config.data.name)
                self._prepare(offer.config, self._paths, folder)
        return folder


def _holds(folder: Path, digest: str) -> bool:
    """Return whether a folder holds these data, undamaged."""
    try:
        manifest = store.read_manifest(folder)
        if manifest.digest != digest:
            return False
        store.verify(folder, manifest, tuple(manifest.counts))
    except DataError:
        return False
    return True
