"""What params.yaml sets, frozen and typed; every check of it; identity told apart from placement."""

import difflib
import hashlib
import json
import math
from typing import Any, Self

from pydantic import Field, model_validator

from pipeline.config.sections import Checkpoint, Data, Dist, Model, Section, Tracking, Train


class ConfigError(ValueError):
    """A setting is wrong: exit 2."""

    exit_code = 2


class DataError(ValueError):
    """The data are wrong: exit 3."""

    exit_code = 3


class MachineError(RuntimeError):
    """The machine cannot do it: exit 4."""

    exit_code = 4


class PeerError(RuntimeError):
    """Another machine of the job was lost, or never came: exit 6."""

    exit_code = 6


class Config(Section):
    """All of params.yaml."""

    seed: int = Field(default=1, ge=0)
    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    dist: Dist = Dist()
    checkpoint: Checkpoint = Checkpoint()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data.mixes and self.dist.pieces == self.dist.images_per_step:
            cure = "set fewer dist.lanes" if self.dist.lanes else "take a larger batch"
            raise ValueError(f"data.augment: {min(self.data.mixes)} mixes two images of a lane, and each has one; {cure}")
        return self

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after warm-up, scaled with the global batch if that is asked for."""
        share = self.dist.images_per_step / self.train.base_batch
        return self.train.learning_rate * {"none": 1.0, "linear": share, "sqrt": math.sqrt(share)}[self.train.scale_learning_rate]

    def identity(self, device_kind: str, precision: str, backend: str) -> dict[str, Any]:
        """All settings that can change the bits; under `ordered`, where and on how many ranks it runs is not among them."""
        always = {"lanes", "reduction", "strategy", "threads_per_rank"}
        dist = {"global_batch": self.dist.images_per_step} | self.dist.model_dump(include=always)
        if self.dist.reduction != "ordered":
            dist |= self.dist.model_dump(include={"world_size", "nodes", "accumulation"}) | {"backend": backend}
            if self.dist.replicas > 1:
                dist["replicas"] = self.dist.replicas
            if self.dist.sync_batchnorm:
                dist["sync_batchnorm"] = True
            if self.dist.strategy == "allreduce":
                dist["algorithm"] = self.dist.algorithm or "ring"
        plain = {"class_weights"} if self.train.class_weights == "none" else None
        return {
            "seed": self.seed,
            # What prepare writes has its own digest.
            "data": self.data.model_dump(exclude={"root", "allow_broken", "store"}),
            "model": self._model(),
            "train": self.train.model_dump(exclude=plain) | {"precision": precision},
            "dist": dist,
            "device": device_kind,
        }

    def _model(self) -> dict[str, Any]:
        """What names a model: of the user's own, what its file holds, wherever that lies."""
        found: dict[str, Any] = {"name": self.model.name}
        if self.model.source is not None:
            sha256 = hashlib.sha256(self.model.source.encode()).hexdigest()
            found = {"name": self.model.name.rpartition(":")[2], "source_sha256": sha256, "options": self.model.options}
        return found | ({"frozen": sorted(set(self.model.frozen))} if self.model.frozen else {})


def draw_seed(seed: int, *key: object) -> int:
    """A 63-bit seed that is a function of (seed, key) alone: every random draw starts from one."""
    return int.from_bytes(hashlib.sha256(repr((seed, *key)).encode()).digest()[:8], "big") >> 1


def digest(value: Any) -> str:
    """The SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def unknown(key: str, name: str, valid: list[str]) -> ConfigError:
    """The error for a name that is in no catalogue, with the nearest valid ones."""
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return ConfigError(f"{key}: {name!r} is unknown; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(valid)}"))
