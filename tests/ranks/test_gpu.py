"""What only a GPU can show. `LOCKSTEP_GPU=cpu` rehearses it on a CPU, where it must hold too."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from pipeline import models
from pipeline.config import ConfigError, MachineError
from pipeline.data import store
from pipeline.data.augment import CropFlip
from pipeline.data.batches import Pixels
from pipeline.hardware import machine
from pipeline.job import Job
from pipeline.models.pools import check_backward
from pipeline.models.torchvision_names import NAMES
from pipeline.ranks import Ranks
from pipeline.tracking.journal import Journal, Silent
from pipeline.training import export, loop, train_rank
from pipeline.training.checkpoint_file import copied, weights_sha256
from pipeline.training.guard import NonFiniteGuard
from tests.kit.devices import GPU, NCCL, gpu
from tests.kit.experiment import make_job
from tests.ranks.test_bits import CASES, RESNET_BF16, Placement, job_of, steps_of, trained

LENET, RESNET = "lenet, crop-flip, bf16", "resnet18, crop-flip, fp32"
ON_GPU = torch.device(GPU)
MIB = 2**20


def job_on_gpu(folder: Path, case: str, run: str, size: int = 1) -> Job:
    return job_of(folder, case, Placement(size), run, GPU)


def short_of_memory(group: Ranks, job: Job, left: int | None) -> str:
    """The digest of a training with so many bytes of the GPU's memory left, or why there is none."""
    kept = None
    try:
        if left is not None and GPU == "cuda":
            kept = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device=ON_GPU)
        return trained(group, job, None)[0]
    except MachineError as error:
        return f"refused: {error}"
    except RuntimeError as error:
        # CUDA's libraries have errors of their own for it.
        return f"out of memory: {error}"
    finally:
        del kept


@gpu("G6: with little memory a run ends in the same bits or in an error, never in other bits")
def test_a_gpu_short_of_memory_computes_the_same_bits_or_none(tmp_path: Path, run_ranks, record_property) -> None:
    found = {}
    for left in (None, *(share * MIB for share in (range(160, 420, 20) if GPU == "cuda" else [160]))):
        job = job_on_gpu(tmp_path, RESNET, f"left {left}")
        ((found[left],),) = run_ranks(1, (short_of_memory, (job, left)), device=GPU)
    record_property("endings", {str(left): said[:80] for left, said in found.items()})
    assert {said for said in found.values() if ": " not in said} == {found[None]}
    if GPU == "cuda" and not any("kernel" in said for said in found.values()):
        pytest.skip("no allocation failed without a word: not shown")


def one_step(group: Ranks, name: str) -> str:
    """Two steps of a model on the GPU, from one seed: their gradients' digest, or that it is refused."""
    torch.use_deterministic_algorithms(True)
    digests = set()
    for _ in range(2):
        torch.manual_seed(0)
        side = 224 if name.startswith(models.TORCHVISION) else 28
        try:
            model = models.build(name, 3, side, 10).to(device=group.device, memory_format=torch.channels_last)
            check_backward(model, name, torch.device("cuda"))
        except ConfigError as error:
            return str(error)
        try:
            digests.add(weights_sha256(gradients_of(model, side, group.device)))
        except RuntimeError as error:
            # Such as an operation that has no deterministic kernel.
            return str(error).splitlines()[0]
    return "equal" if len(digests) == 1 else "other bits"


def gradients_of(model: torch.nn.Module, side: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The gradients of two images that are drawn."""
    images = torch.randn(2, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(images)
    F.cross_entropy(logits.float(), torch.tensor([1, 2], device=device)).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


# Each needs up to a minute on a CPU.
EVERY = [*models.CATALOGUE, *(models.TORCHVISION + name for name in NAMES)] if GPU == "cuda" else ["lenet", "torchvision:resnet18"]


@gpu("G7: every model of the catalogue and of torchvision has a deterministic backward")
@pytest.mark.timeout(580)
def test_every_model_has_a_deterministic_backward(run_ranks) -> None:
    (found,) = run_ranks(1, *((one_step, (name,)) for name in EVERY), device=GPU)
    assert dict(zip(EVERY, found, strict=True)) == dict.fromkeys(EVERY, "equal")


def exported(group: Ranks, job: Job) -> list[list[float]]:
    """Train, publish the model, and say what it answers on this device to the first images."""
    train_rank.fix_bits(job.config.dist.threads_per_rank)
    state, _, _ = train_rank.train(job, group, Journal(job.journal))
    export.export(job)
    manifest = store.read_manifest(job.prepared)
    # The best one is published, not the last.
    state.model.load_state_dict(load_file(job.run / "model.safetensors"))
    whole = export.Classifier(state.model, manifest).to(group.device).eval()
    with torch.no_grad():
        answers = whole(torch.from_numpy(store.open_split(job.prepared, "validation").images[:8]).to(group.device))
    return answers.cpu().tolist()


@gpu("G11: the published program runs on a CPU and answers within 1e-3 of the trained model")
def test_the_published_program_answers_on_a_cpu_as_the_model_on_the_gpu(tmp_path: Path, run_ranks) -> None:
    job = job_on_gpu(tmp_path, RESNET, "exported")
    ((answers,),) = run_ranks(1, (exported, (job,)), device=GPU)
    program = torch.export.load(job.run / "model.pt2").module()
    with torch.no_grad():
        here = program(torch.from_numpy(np.array(store.open_split(job.prepared, "validation").images[:8])))
    assert torch.allclose(here, torch.tensor(answers), atol=1e-3)


@gpu("G12: a GPU crops, flips and scales to the same bits as a CPU")
def test_a_gpu_prepares_images_as_a_cpu_does() -> None:
    images = torch.randint(256, (500, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    samples = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    for epoch in (0, 1):
        here = CropFlip(3, 500)(images, samples, epoch)
        there = CropFlip(3, 500)(images.to(ON_GPU), samples.to(ON_GPU), epoch)
        assert torch.equal(here, there.cpu())
        scaled, scaled_there = (Pixels([0.1, 0.2, 0.3], [0.4, 0.5, 0.6], device)(here) for device in (torch.device("cpu"), ON_GPU))
        assert torch.equal(scaled, scaled_there.cpu())


@gpu("G14: what is detected without torch is what torch sees")
def test_the_machine_is_what_torch_sees() -> None:
    found = machine.detect()
    assert len(found.gpus) == torch.cuda.device_count()
    for kind, index in zip(found.gpus, range(torch.cuda.device_count()), strict=True):
        facts = torch.cuda.get_device_properties(index)
        assert kind.startswith(f"{facts.name} ({facts.multi_processor_count} SMs, capability {facts.major}.{facts.minor})")


FIRST_STEPS = 15


class Strict(NonFiniteGuard):
    """Lets no read or copy wait for the GPU until the next log line; waits for events and in collectives are not seen."""

    seen = 0

    def observe(self) -> None:
        super().observe()
        self.seen += 1
        # Not in the first steps, in which DDP lays out its buckets anew and times itself.
        if GPU == "cuda" and self.seen > FIRST_STEPS:
            torch.cuda.set_sync_debug_mode("error")

    def raise_if_diverged(self) -> None:
        if GPU == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        super().raise_if_diverged()


def without_waiting(group: Ranks, job: Job) -> int:
    patch = pytest.MonkeyPatch()
    patch.setattr(train_rank, "NonFiniteGuard", Strict)
    patch.setattr(train_rank, "plan", lambda *_: loop.Steps(50, 50, 50, 1000, 48))
    train_rank.fix_bits(job.config.dist.threads_per_rank)
    try:
        return train_rank.train(job, group, Silent())[1]
    finally:
        patch.undo()


@gpu("G15: no read or copy waits for the GPU between two log lines")
@pytest.mark.parametrize("strategy", ["ddp", "graphs"])
def test_nothing_waits_for_the_gpu_between_two_log_lines(strategy: str, tmp_path: Path, run_ranks) -> None:
    dist = {"world_size": 1, "batch_size_per_gpu": 48, "lanes": 4, "strategy": strategy}
    job = make_job(tmp_path, "bf16", model__name="lenet", data={"name": "synthetic:5000", "augment": "crop-flip"}, dist=dist)
    job = job.model_copy(update={"device": GPU})
    assert run_ranks(1, (without_waiting, (job,)), device=GPU, backend=NCCL) == [[50]]


@gpu("G17: digests of this kind of GPU")
def test_digests_of_this_kind_of_gpu(tmp_path: Path, run_ranks, record_property) -> None:
    cases = [*CASES, RESNET_BF16]
    (found,) = run_ranks(1, *((trained, (job_on_gpu(tmp_path, case, "golden"), None)) for case in cases), device=GPU)
    assert [step for _, step in found] == [steps_of(case) for case in cases]
    record_property("digests", {case: digest for case, (digest, _) in zip(cases, found, strict=True)})


@gpu("S5: a checkpoint has what was there when it was copied, though the training has gone on")
def test_a_copy_for_a_checkpoint_waits_for_what_is_computed_and_for_nothing_later() -> None:
    value = torch.zeros(1 << 22, device=GPU)
    if GPU == "cuda":
        torch.cuda._sleep(1 << 28)
    value.fill_(1)
    copies = copied([("value", value)])
    value.fill_(2)
    assert torch.all(copies()["value"] == 1)
