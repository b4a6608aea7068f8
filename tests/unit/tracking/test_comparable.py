"""Which runs a comparison is fair between."""

from typing import Any

from pipeline.config import Config
from pipeline.tracking.receipt import comparable
from tests.kit.experiment import settings


def tag(prepared: str = "0" * 64, source: str | None = "1" * 64, **changes: Any) -> str:
    config = Config.model_validate(settings(**changes))
    data = {"prepared data": prepared, "source data": source}
    return comparable(config.identity("a cpu", "fp32", "gloo") | data | {"source": {"a": "b"}})


def test_runs_are_comparable_that_differ_in_seed_and_placement_alone() -> None:
    here = tag()
    # Another seed holds out other images.
    assert tag(seed=5, prepared="2" * 64) == here
    assert tag(source="2" * 64) != here
    assert tag(dist__world_size=4, dist__batch_size_per_gpu=24) == here
    native = {"dist__reduction": "native", "dist__lanes": None}
    assert tag(**native) != here
    assert tag(**native, dist__world_size=4, dist__batch_size_per_gpu=24) == tag(**native)
    for change in ({"train__learning_rate": 0.04}, {"dist__lanes": 8}, {"model__name": "mlp"}, {"dist__batch_size_per_gpu": 24}):
        assert tag(**change) != here
