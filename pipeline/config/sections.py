"""The sections of params.yaml: typed, frozen, and each checked by itself."""

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

# Of a key that takes a list or a word: which of them was meant, so that only what is wrong with that is told.
LIST, WORD = "<list>", "<word>"
LIST_OR_WORD = Discriminator(lambda value: WORD if isinstance(value, str) else LIST)


# Of an augmentation: one word, or a list of what is done to one image, and then to two.
Step = Literal["crop", "flip", "resized-crop", "colour-jitter", "erasing"]
Mix = Literal["mixup", "cutmix"]
Augmentation = Annotated[list[Literal[Step, Mix]], Tag(LIST)] | Annotated[Literal["none", "crop-flip"], Tag(WORD)]


class Section(BaseModel):
    """What every section of params.yaml is: frozen, strict, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Data(Section):
    name: str = "fashion-mnist"
    root: str | None = None
    validation_share: float = Field(default=0.1, gt=0, lt=1)
    image_size: int | None = Field(default=None, ge=4, le=4096)
    allow_broken: int = Field(default=0, ge=0)
    store: Literal["pixels", "originals"] = "pixels"
    augment: Annotated[Augmentation, LIST_OR_WORD] = "none"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, plain in {"allow_broken": 0, "store": "pixels"}.items():
            if getattr(self, key) != plain and self.name != "imagefolder":
                raise ValueError(f"{key}: is for images in files, of data.name: imagefolder; set {key}: {plain}")
        if isinstance(self.augment, list) and (not self.augment or len(set(self.augment)) < len(self.augment)):
            raise ValueError(f"augment: {self.augment} must name steps, each of them once, or be none")
        after = [*self.augment][-len(self.mixes) :] if self.mixes else []
        if set(after) != self.mixes:
            raise ValueError(f"augment: {self.augment}: mixup and cutmix come last")
        return self

    @property
    def mixes(self) -> set[str]:
        """The steps of the augmentation that mix two images."""
        return set() if isinstance(self.augment, str) else {*self.augment} & {*get_args(Mix)}


class Model(Section):
    name: str = "lenet"
    options: dict[str, bool | int | float | str] = {}
    weights: str | None = None
    frozen: list[str] = []
    # Of a model of the user's own: what its file held when the training was planned. It is no key of params.yaml.
    source: str | None = Field(default=None, repr=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.frozen and self.weights is None:
            raise ValueError("frozen: only weights that were trained are worth keeping; set model.weights, or frozen: []")
        return self


class Train(Section):
    epochs: int = Field(default=10, ge=1)
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = Field(default=0.1, gt=0)
    scale_learning_rate: Literal["none", "linear", "sqrt"] = "none"
    base_batch: int = Field(default=256, ge=1)
    momentum: float | None = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=0.0005, ge=0)
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_epochs: int = Field(default=1, ge=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    class_weights: Literal["none", "balanced"] = "none"
    clip_norm: float | None = Field(default=None, gt=0)
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    precision: Literal["auto", "fp32", "bf16"] = "auto"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.optimizer == "adamw" and self.momentum is not None:
            raise ValueError("momentum: adamw has none; set momentum: null")
        if self.optimizer == "sgd" and self.momentum is None:
            raise ValueError("momentum: sgd needs one; 0.0 is plain gradient descent")
        if self.scale_learning_rate == "none" and self.base_batch != 256:
            raise ValueError("base_batch: only scale_learning_rate: linear or sqrt takes one; set base_batch: 256")
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs: {self.warmup_epochs} is more than epochs ({self.epochs})")
        return self


class Dist(Section):
    world_size: int = Field(default=2, ge=1)
    # Then world_size is one rank a machine, until a machine says how many it runs. It is no key of its own.
    auto: bool = Field(default=False, exclude=True, alias="world_size: auto")
    nodes: int = Field(default=1, ge=1)
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    init_method: str = "env://"
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    batch_size_per_gpu: int | None = Field(default=128, ge=1)
    global_batch: int | None = Field(default=None, ge=1)
    accumulation: int = Field(default=1, ge=1)
    strategy: str = "ddp"
    algorithm: Literal["flat", "hierarchical", "butterfly", "ring", "naive", "1f1b", "gpipe"] | None = None
    replicas: int = Field(default=1, ge=1)
    reduction: Literal["ordered", "native"] = "ordered"
    lanes: int | None = Field(default=4, ge=1)
    lanes_per_rank: Annotated[Annotated[list[int], Tag(LIST)] | Annotated[Literal["auto"], Tag(WORD)], LIST_OR_WORD] | None = None
    sync_batchnorm: bool = False
    find_unused_parameters: bool = False
    elastic: bool = False
    threads_per_rank: int = Field(default=1, ge=1)
    timeout_seconds: int = Field(default=300, ge=5)
    grace_seconds: int = Field(default=60, ge=1)

    @property
    def images_per_step(self) -> int:
        """The global batch, said as such or for every rank."""
        return self.global_batch or self.world_size * (self.batch_size_per_gpu or 0) * self.accumulation

    @property
    def batch_key(self) -> str:
        """The key that says how large a batch is."""
        return "global_batch" if self.batch_size_per_gpu is None else "batch_size_per_gpu"

    @property
    def pieces(self) -> int:
        """How many equal pieces a global batch is cut into: the lanes, or every rank's micro-batches."""
        return self.lanes if self.lanes is not None else self.world_size * self.accumulation

    @property
    def pieces_per_rank(self) -> list[int]:
        if isinstance(self.lanes_per_rank, list):
            return [self.pieces] if self.strategy == "dataparallel" else list(self.lanes_per_rank)
        whole, rest = divmod(self.pieces, self.world_size)
        return [whole + (rank < rest) for rank in range(self.world_size)]

    @model_validator(mode="before")
    @classmethod
    def _read_auto(cls, values: Any) -> Any:
        found = isinstance(values, dict) and values.get("world_size") == "auto"
        return values | {"world_size": values.get("nodes", 1), "world_size: auto": True} if found else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        shares = isinstance(self.lanes_per_rank, list)
        if self.auto and (self.reduction, self.batch_size_per_gpu, self.replicas, shares) != ("ordered", None, 1, False):
            raise ValueError("world_size: auto needs global_batch, ordered, replicas: 1, and null as batch_size_per_gpu and lanes_per_rank")
        self._check_batch()
        found = re.fullmatch(r"env://|tcp://[^/]+:(\d{1,5})|file:///.*[^/]", self.init_method)
        if not found or not 0 < int(found[1] or 1) < 65536:
            raise ValueError(f"init_method: {self.init_method!r}: write env://, tcp://HOST:PORT or file:///PATH")
        if self.world_size % self.nodes:
            raise ValueError(f"nodes: {self.nodes} does not divide world_size ({self.world_size})")
        if self.reduction == "native":
            if self.lanes is not None:
                raise ValueError("lanes: native reduction has none; set lanes: null, or reduction: ordered")
            if self.lanes_per_rank is not None:
                raise ValueError("lanes_per_rank: only reduction: ordered takes unequal ranks; set lanes_per_rank: null")
            return self
        if self.lanes is None:
            raise ValueError(f"lanes: reduction: ordered needs at least {self.world_size * self.accumulation}, or set reduction: native")
        self._check_lanes(self.lanes)
        return self

    def _check_batch(self) -> None:
        if self.batch_size_per_gpu is None and self.global_batch is None:
            raise ValueError("batch_size_per_gpu: is missing; set it, or global_batch")
        if self.batch_size_per_gpu is None:
            if self.reduction == "native" and self.images_per_step % self.pieces:
                raise ValueError(f"global_batch: {self.global_batch} is not divisible by world_size x accumulation ({self.pieces})")
            if self.reduction == "ordered" and self.accumulation > 1:
                raise ValueError("accumulation: global_batch is cut into lanes, which a rank accumulates; set accumulation: 1")
            return
        product = self.world_size * self.batch_size_per_gpu * self.accumulation
        if self.global_batch not in (None, product):
            said = f"world_size x batch_size_per_gpu x accumulation ({self.world_size} x {self.batch_size_per_gpu} x {self.accumulation}"
            raise ValueError(f"global_batch: {self.global_batch} is not {said} = {product}); set one to null")

    def _check_lanes(self, lanes: int) -> None:
        if lanes < (least := self.world_size * self.accumulation):
            raise ValueError(f"lanes: {lanes} is fewer than world_size x accumulation; at least {least} would do, with other bits")
        if self.images_per_step % lanes:
            raise ValueError(f"lanes: {lanes} does not divide the global batch ({self.images_per_step}); set lanes or {self.batch_key}")
        own = self.lanes_per_rank
        if isinstance(own, list):
            # One rank may have several GPUs.
            count = len(own) if self.strategy == "dataparallel" else self.world_size
            if (len(own), sum(own)) != (count, lanes) or min(own) < 1:
                raise ValueError(f"lanes_per_rank: {own} must be {count} numbers of at least 1 that add up to lanes ({lanes})")


class Checkpoint(Section):
    every_steps: int = Field(default=200, ge=1)
    keep: int = Field(default=3, ge=1)


class Tracking(Section):
    experiment: str = Field(default="lockstep", min_length=1)
    log_every_steps: int | None = Field(default=None, ge=1)
