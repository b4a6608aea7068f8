"""An import of another run, from what is left of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, ConfigError
from pipeline.job import Job
from pipeline.runs.resume import import_run
from tests.kit.experiment import settings
from tests.kit.lossy_ledger import PER_EPOCH, TOTAL, plan_of, raw_figures, unhurt_of
from tests.kit.lossy_training import train

PLAN = plan_of((4,) * (TOTAL // PER_EPOCH), 2)


def imported(source: Path, run: Path, identity: dict[str, Any] | None = None) -> str | None:
    values = {"device": "cpu", "backend": "gloo", "precision": "fp32", "prepared": run, "run": run}
    job = Job.model_validate({"config": Config.model_validate(settings())} | values)
    return import_run(source, job, identity or {"seed": 1}, {"experiment": "one", "name": "one", "params": {}, "tags": {}})


def test_a_checkpoint_whose_figures_are_gone_is_not_imported(tmp_path: Path) -> None:
    """It was refused in the run that it comes from, and would be taken in this one, whose journal has never had them."""
    source, run = tmp_path / "source", tmp_path / "run"
    train(source, 2, 4, plan=PLAN)
    lines = (source / "journal.jsonl").read_bytes().splitlines(keepends=True)
    third = next(at for at, line in enumerate(lines) if b'"step": 3' in line)
    (source / "journal.jsonl").write_bytes(b"".join(lines[:third]))
    assert "step-00000002" in str(imported(source, run))
    assert train(run, 2, TOTAL, plan=PLAN).restored == 2
    assert dict(raw_figures(run)) == unhurt_of((4,) * (TOTAL // PER_EPOCH)).figures


@pytest.mark.parametrize("content", ["[]", '"seed"', "7", "null", "", "{"])
def test_an_identity_that_is_none_names_the_folder(content: str, tmp_path: Path) -> None:
    train(tmp_path / "source", 2, 4, plan=PLAN)
    (tmp_path / "source" / "identity.json").write_text(content)
    with pytest.raises(ConfigError, match="is no folder of a run"):
        imported(tmp_path / "source", tmp_path / "run")


def test_a_damaged_index_is_not_imported(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    train(source, 2, 4, plan=PLAN)
    whole = (source / "checkpoints" / "index.json").read_bytes()
    (source / "checkpoints" / "index.json").write_bytes(whole[:-20])
    imported(source, run)
    assert not (run / "checkpoints" / "index.json").exists()
    assert train(run, 2, 2, plan=PLAN).restored == 4
    assert len(json.loads((run / "checkpoints" / "index.json").read_bytes())["checkpoints"]) == 2


def identity(strategy: str, **dist: Any) -> dict[str, Any]:
    source = {"training.loop": "1", f"parallel.{strategy}": "2"}
    return {"dist": {"strategy": strategy, "reduction": "ordered", "lanes": 4} | dist, "source": source}


def test_of_another_strategy_alone_its_own_modules_may_differ(tmp_path: Path) -> None:
    source, here = tmp_path / "source", identity("ddp")
    train(source, 2, 4, plan=PLAN)
    (source / "identity.json").write_text(json.dumps(here))
    there = identity("fsdp")
    assert "with dist.strategy ddp -> fsdp: the same samples" in str(imported(source, tmp_path / "run", there))
    refused = {
        "source.training.loop": there | {"source": there["source"] | {"training.loop": "3"}},
        "dist.lanes": identity("fsdp", lanes=8),
        "dist.reduction": identity("fsdp", reduction="native"),
        "source.parallel.more": here | {"source": here["source"] | {"parallel.more": "4"}},
    }
    for key, changed in refused.items():
        with pytest.raises(ConfigError, match=f"another experiment \\({key}: "):
            imported(source, tmp_path / "another", changed)
