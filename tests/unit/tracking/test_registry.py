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

    def __init__(self, client: MlflowClient, name: str = "lockstep"):
        self.client, self.experiment = client, client.create_experiment(name)
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


@pytest.mark.parametrize("name", ["team/mnist", "it's", 'a "good" one', "a:b`c"])
def test_an_experiment_of_any_name_has_a_registered_model(client: MlflowClient, name: str) -> None:
    registry = Registry(client, name)
    run = registry.trained()
    facts = {"model": "fashion-mnist", "accuracy": 0.9, "clean": True, "tests": "a" * 16}
    for _ in range(2):
        register(client, run, registry.models[run], facts)
    (model,) = client.search_registered_models()
    assert {name: int(version) for name, version in model.aliases.items()} == {"champion": 1}
    assert len(client.search_model_versions(f"run_id = '{run}'")) == 1


def test_of_two_evaluations_at_once_the_better_one_is_champion(client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(client)
    first, better, good = (registry.trained() for _ in range(3))
    assert registry.evaluated(first, 0.85) == first
    old = client.get_registered_model(NAME).aliases
    assert registry.evaluated(better, 0.91) == better
    seen = client.get_registered_model

    def before_the_other(name: str) -> Any:
        found = seen(name)
        found.aliases.update(old)
        return found

    with monkeypatch.context() as patched:
        # It has read the champion before the other one has moved it.
        patched.setattr(client, "get_registered_model", before_the_other)
        facts = {"model": "fashion-mnist", "accuracy": 0.90, "clean": True, "tests": "a" * 16}
        register(client, good, registry.models[good], facts)
    champion = client.get_registered_model(NAME).aliases["champion"]
    assert client.get_model_version(NAME, champion).run_id == better
