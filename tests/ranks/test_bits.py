"""The promise: the same weights on any number of ranks, whoever owns the lanes, and through interruptions."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

from pipeline.config.sections import Mix, Step
from pipeline.job import Job
from pipeline.tracking.journal import Journal, Silent, Writer
from pipeline.training import train_rank
from pipeline.training.checkpoint_file import weights_sha256
from tests.kit.devices import GPU, NCCL, ONE_GPU, also_on_gpu
from tests.kit.experiment import make_job

# Six steps an epoch, 18 in all; a ResNet-18, whose step takes a second, has half of both.
SHAPE: dict[str, Any] = {"data": {"name": "synthetic:336"}, "train__epochs": 3, "train__learning_rate": 0.02, "checkpoint__every_steps": 4}
CASES: dict[str, dict[str, Any]] = {
    "lenet, crop-flip, bf16": {"model__name": "lenet", "data": {"name": "synthetic:336", "augment": "crop-flip"}, "precision": "bf16"},
    "mlp with dropout, fp32": {"model__name": "mlp"},
    "mlp with dropout, adamw, bf16": {"model__name": "mlp", "precision": "bf16", "train__optimizer": "adamw", "train__momentum": None},
    "resnet18, crop-flip, fp32": {
        "model__name": "resnet18",
        "data": {"name": "synthetic:168", "augment": "crop-flip", "image_size": 12},
        "train__learning_rate": 0.01,
    },
}
# Trained on fewer placements.
EIGHT_LANES = "mlp, constant rate, label smoothing, eight lanes"
TORCHVISION = "a model of torchvision"
RESNET_BF16 = "resnet18, bf16"
AUGMENTED = "lenet, every augmentation, balanced classes"
FEW: dict[str, dict[str, Any]] = {
    EIGHT_LANES: {"model__name": "mlp", "train__schedule": "constant", "train__label_smoothing": 0.1},
    TORCHVISION: {"model__name": "torchvision:shufflenet_v2_x0_5", "data": {"name": "synthetic:336", "image_size": 32}},
    RESNET_BF16: {"model__name": "resnet18", "data": {"name": "synthetic:168", "image_size": 12}, "precision": "bf16"},
    AUGMENTED: {
        "model__name": "lenet",
        "data": {"name": "synthetic:336", "augment": [*get_args(Step), *get_args(Mix)]},
        "train__class_weights": "balanced",
    },
}


class Placement(NamedTuple):
    """How the lanes of one global batch of 48 images are spread."""

    size: int
    share: tuple[int, ...] | None = None
    accumulation: int = 1


PLACEMENTS = [Placement(1), Placement(2), Placement(2, (3, 1)), Placement(3), Placement(3, (1, 1, 2)), Placement(4)]
FEW_PLACEMENTS = {
    EIGHT_LANES: [Placement(1), Placement(3, (2, 3, 3)), Placement(2, None, 2)],
    TORCHVISION: [Placement(1), Placement(2)],
    RESNET_BF16: [Placement(1), Placement(3, (1, 1, 2))],
    AUGMENTED: [Placement(1), Placement(2, (3, 1)), Placement(3)],
}


def placed() -> list[tuple[str, Placement]]:
    """Every case on every placement that it is trained on."""
    few = [(case, placement) for case, those in FEW_PLACEMENTS.items() for placement in those]
    # Of a ResNet-18, whose step takes a second, those that differ most.
    most = [(case, placement) for case in CASES for placement in PLACEMENTS[:: 3 if "resnet18" in case else 1]]
    return few + most + [(case, PLACEMENTS[-1]) for case in CASES if "resnet18" in case]


def steps_of(case: str) -> int:
    return 9 if "resnet18" in case else 18


def job_of(folder: Path, case: str, placement: Placement, run: str, device: str = "cpu") -> Job:
    """The case on some ranks: the global batch is 48, and has as many lanes on all of them."""
    size, share, accumulation = placement
    values = {
        "dist__world_size": size,
        "dist__accumulation": accumulation,
        "dist__batch_size_per_gpu": 48 // size // accumulation,
        "dist__lanes": 8 if case == EIGHT_LANES else 4,
        "dist__lanes_per_rank": list(share) if share else None,
    }
    job = make_job(folder / case, **(SHAPE | (CASES | FEW)[case] | values))
    return job.model_copy(update={"run": folder / case / run, "device": device})


class StoppingAt:
    """A journal that sends this process a real SIGTERM when a step is told."""

    def __init__(self, journal: Writer, step: int):
        self._journal, self._step = journal, step
        self.event = journal.event

    def metrics(self, values: dict[str, float], step: int) -> None:
        self._journal.metrics(values, step)
        if step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def trained(group: Any, job: Job, stop_after: int | None) -> tuple[str, int]:
    """Train on this rank; a SIGTERM reaches the last rank, and only it, when it has done a step."""
    train_rank.fix_bits(job.config.dist.threads_per_rank)
    journal = group.on_rank_zero(lambda: Journal(job.journal), Silent())
    if stop_after is not None and group.rank == group.size - 1:
        journal = StoppingAt(journal, stop_after)
    with ThreadPoolExecutor(1) as executor:
        state, step, _ = train_rank.train(job, group, journal, executor)
    return weights_sha256(state.weights()), step


@pytest.mark.slow
@pytest.mark.timeout(1500)
@also_on_gpu("G2, G10: one digest on any ranks, and through stops and checkpoints")
def test_weights_have_the_same_bits_on_any_ranks_and_through_stops(device: str, tmp_path: Path, run_ranks) -> None:
    expected: dict[str, str] = {}
    compared = 0
    for size in (1, 2, 3, 4):
        keys = [(case, placement) for case, placement in placed() if placement.size == size]
        work = [(trained, (job_of(tmp_path, case, placement, str(placement), device), None)) for case, placement in keys]
        for results in run_ranks(size, *work, device=device):
            for (case, placement), (digest, step) in zip(keys, results, strict=True):
                assert step == steps_of(case)
                assert digest == expected.setdefault(case, digest), (case, placement)
                compared += 1
    assert compared == sum(placement.size for _, placement in placed())
    assert len(set(expected.values())) == len(CASES | FEW)

    # Stopped in the first epoch, in the middle of the second, and in the last; each time it goes on with other ranks.
    for size, share in ((2, 1 / 9), (3, 4 / 9), (1, 7 / 9), (2, None)):
        stops = [round(steps_of(case) * share) if share else None for case in CASES]
        jobs = [job_of(tmp_path, case, Placement(size), "stopped", device) for case in CASES]
        work = [(trained, parts) for parts in zip(jobs, stops, strict=True)]
        for case, stop, (digest, step) in zip(CASES, stops, run_ranks(size, *work, device=device)[0], strict=True):
            if stop is None:
                assert (step, digest) == (steps_of(case), expected[case]), case
            else:
                # The question put after the signal is answered one step later.
                assert step == stop + 1, (case, size)


@pytest.mark.slow
@also_on_gpu("G3, G4: the same bits twice, under nccl, and on two ranks that share a GPU")
def test_one_device_gives_the_same_bits_twice_and_to_two_ranks_that_share_it(device: str, tmp_path: Path, run_ranks) -> None:
    backends = {"once": "gloo", "twice": "gloo", "nccl": NCCL if device == GPU else "gloo", "shared": "gloo"}
    # A ResNet-18 too where a step does not take a second.
    for case in ["lenet, crop-flip, bf16"] if device == "cpu" else ["lenet, crop-flip, bf16", "resnet18, crop-flip, fp32", RESNET_BF16]:
        digests = []
        for name, backend in backends.items():
            size = 2 if name == "shared" else 1
            job = job_of(tmp_path, case, Placement(size), name, device)
            ran = run_ranks(size, (trained, (job, None)), device=device, backend=backend, **({} if device == "cpu" else ONE_GPU))
            digests += [digest for ((digest, _),) in ran]
        assert len(digests) == 5
        assert len(set(digests)) == 1, case


@pytest.mark.slow
@also_on_gpu("G16: a training with graphs has the bits of ddp, also when it was stopped on another number of ranks")
def test_graphs_end_in_the_same_bits_as_ddp(device: str, tmp_path: Path, run_ranks) -> None:
    def of(case: str, strategy: str, size: int, run: str) -> Job:
        job = job_of(tmp_path, case, Placement(size), run, device)
        dist = job.config.dist.model_copy(update={"strategy": strategy})
        return job.model_copy(update={"config": job.config.model_copy(update={"dist": dist})})

    cases = ["lenet, crop-flip, bf16", "mlp with dropout, adamw, bf16"] + ([] if device == "cpu" else [RESNET_BF16])
    for case in cases:
        (((expected, _),),) = run_ranks(1, (trained, (of(case, "ddp", 1, "ddp"), None)), device=device)
        half = steps_of(case) // 2
        for size, stop in ((2, half), (1, None)):
            (found,) = {result for (result,) in run_ranks(size, (trained, (of(case, "graphs", size, "graphs"), stop)), device=device)}
            assert found[1] == (half + 1 if stop else steps_of(case))
        assert found == (expected, steps_of(case)), case
