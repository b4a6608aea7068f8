"""Registered models: a version an evaluated run, and a champion that moves only for the better."""

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModel

from pipeline.tracking.registry import register
from tests.kit.experiment import database

NAME = "lockstep-fashion-mnist"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    (tmp_path / "mlflow.db").write_bytes(database())
    # A registry asks for its model there, whatever a client was given.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return MlflowClient()


class Registry:
    """An experiment whose runs have a model each."""

    def __init__(self, client: MlflowClient):
        self.client, self.experiment = client, client.create_experiment("lockstep")
        self.models: dict[str, LoggedModel] = {}

    def trained(self) -> str:
        run = self.client.create_run(self.experiment).info.run_id
        self.models[run] = self.client.create_logged_model(self.experiment, "model", source_run_id=run)
        return run

    def evaluated(self, run: str, accuracy: float, **changes: Any) -> str | None:
        """Register it; returns the run of the champion."""
        facts = {"model": "fashion-mnist", "accuracy": accuracy, "clean": True, "tests": "a" * 16}
        register(self.client, run, self.models[run], facts | changes)
        champion = self.client.get_registered_model(NAME).aliases.get("champion")
        return None if champion is None else self.client.get_model_version(NAME, champion).run_id


def test_the_champion_moves_only_for_a_better_model_of_committed_code_on_the_same_images(client: MlflowClient) -> None:
    registry = Registry(client)
    first, dirty, worse, other, better = (registry.trained() for _ in range(5))
    assert registry.evaluated(dirty, 0.99, clean=False) is None
    assert registry.evaluated(first, 0.90) == first
    assert registry.evaluated(worse, 0.89) == first
    assert registry.evaluated(other, 0.95, tests="b" * 16) == first
    assert registry.evaluated(better, 0.91) == better
    # It is as good as the champion, and not better.
    assert registry.evaluated(first, 0.91) == better
    versions = client.search_model_versions(f"name = '{NAME}'")
    assert sorted(one.run_id for one in versions) == sorted([first, dirty, worse, other, better])
    (of_first,) = [one for one in versions if one.run_id == first]
    assert of_first.tags == {"test/accuracy": "0.91", "lockstep.tests": "a" * 16, "lockstep.clean": "True"}
    assert of_first.source.startswith("models:/")
