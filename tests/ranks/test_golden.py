"""Golden losses: bit for bit on the kind of CPU they were made on, within a tolerance on any other."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeline.config import digest
from pipeline.hardware import machine
from pipeline.tracking.journal import Journal, read
from pipeline.training import train_rank
from tests.kit.experiment import make_job

GOLDEN = Path(__file__).parent / "golden"
# As a share of the loss: with AVX2 or SSE4.1 kernels alone it was at most 3.2e-7 over these 22 steps in fp32.
OTHER_CPU_TOLERANCE = 1e-5
CASES = {
    "lenet": {"model__name": "lenet", "data": {"name": "synthetic:1200", "augment": "crop-flip"}, "train__learning_rate": 0.1},
    "mlp": {"model__name": "mlp", "train__learning_rate": 0.02},
}


def train(group, job) -> None:
    train_rank.fix_bits(job)
    train_rank.train(job, group, group.only_first(lambda: Journal(job.journal), None) or Journal(job.run / "of-another-rank.jsonl"))


def losses(folder: Path, run_ranks) -> dict[str, list[str]]:
    jobs = {name: make_job(folder / name, **case) for name, case in CASES.items()}
    run_ranks(2, *((train, (job,)) for job in jobs.values()))
    return {
        name: [line["values"]["train/loss"].hex() for line in read(job.journal) if "train/loss" in line.get("values", {})]
        for name, job in jobs.items()
    }


def test_losses_are_the_golden_ones(tmp_path: Path, run_ranks, request: pytest.FixtureRequest) -> None:
    found = losses(tmp_path, run_ranks)
    kind = {"cpu": machine.detect().cpu, "torch": version("torch")}
    mine = GOLDEN / f"{digest(kind)[:12]}.json"
    if request.config.getoption("--write-golden"):
        GOLDEN.mkdir(exist_ok=True)
        mine.write_text(json.dumps(kind | {"losses": found}, indent=1) + "\n")
    if mine.exists():
        assert found == json.loads(mine.read_text())["losses"]
    others = [json.loads(path.read_text()) for path in GOLDEN.glob("*.json")]
    assert others
    for other in others:
        for name in CASES:
            assert len(found[name]) == len(other["losses"][name]) == 22
            for value, golden in zip(found[name], other["losses"][name], strict=True):
                assert float.fromhex(value) == pytest.approx(float.fromhex(golden), rel=OTHER_CPU_TOLERANCE), name
