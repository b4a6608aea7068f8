"""What an engine's PET_* variables make of a machine."""

from typing import Any

import pytest

from pipeline.cluster.environment import detect
from pipeline.config import Config, ConfigError
from tests.kit.experiment import settings


def config(**changes: Any) -> Config:
    return Config.model_validate(settings(**changes))


def test_the_place_in_a_job_is_read_from_pet_variables_and_what_is_missing_is_named() -> None:
    assert detect(config(), {}) is None
    assert detect(config(), {"PET_NNODES": "1:1"}) is None
    named = {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "job-0:29500", "PET_NODE_RANK": "1"}
    found = detect(config(), named)
    assert found is not None
    assert (found.nodes, found.leads, found.host, found.port) == (2, False, "job-0", 29500)
    here = detect(config(), {"PET_NNODES": "2", "PET_MASTER_ADDR": "localhost"})
    assert here is not None
    assert (here.leads, here.port) == (True, 29500)
    with pytest.raises(ConfigError, match="set world_size: 8"):
        detect(config(), named | {"PET_NPROC_PER_NODE": "4"})
    with pytest.raises(ConfigError, match="says where they meet"):
        detect(config(), {"PET_NNODES": "2"})
