"""MLflow's artifacts and DVC's remote in object storage, with what the lock has."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.checkout import clone_of
from tests.kit.experiment import Experiment, clean_environment
from tests.kit.mlflow_contents import artifacts
from tests.kit.servers import Server
from tests.kit.storage import BUCKET, Storage

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def storage() -> Iterator[Storage]:
    one = Storage()
    yield one
    one.kill()


def test_mlflow_keeps_artifacts_and_models_in_a_bucket(experiment: Experiment, storage: Storage, tmp_path: Path) -> None:
    import mlflow

    server = Server(tmp_path / "server", artifacts=f"s3://{BUCKET}/artifacts", **storage.variables()).start()
    try:
        experiment.run("prepare")
        said = experiment.run("train", MLFLOW_TRACKING_URI=server.uri)
        assert "does not have all of it" not in said
        client = mlflow.MlflowClient(server.uri)
        (run,) = [run for one in client.search_experiments() for run in client.search_runs([one.experiment_id])]
        names = artifacts(server.uri, run)
        assert {"receipt.json", "plots/curves.png"} <= set(names)
        kept = {path.name for path in experiment.run_folder.glob("checkpoints/*.safetensors")}
        assert {name.rpartition("/")[2] for name in names if name.startswith("checkpoints/")} == kept
        assert any("receipt.json" in name for name in storage.names())
    finally:
        server.kill()


def test_dvc_pushes_a_model_to_a_bucket_and_another_checkout_pulls_it(storage: Storage, tmp_path: Path) -> None:
    first, second = clone_of(tmp_path / "first"), tmp_path / "second"
    variables = clean_environment() | storage.variables() | {"GIT_AUTHOR_NAME": "test", "GIT_COMMITTER_NAME": "test"}

    def sh(folder: Path, *words: str) -> None:
        done = subprocess.run(words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout

    (first / "model.bin").write_bytes(b"weights" * 1000)
    sh(first, "dvc", "add", "--quiet", "model.bin")
    sh(first, "dvc", "remote", "add", "--default", "bucket", f"s3://{BUCKET}/dvc")
    sh(first, "dvc", "remote", "modify", "bucket", "endpointurl", storage.uri)
    sh(first, "dvc", "push", "--quiet", "model.bin.dvc")
    second.mkdir()
    sh(second, "git", "clone", "-q", str(first), ".")
    for name in ("model.bin.dvc", ".dvc/config"):
        (second / name).write_bytes((first / name).read_bytes())
    sh(second, "dvc", "pull", "--quiet", "model.bin.dvc")
    assert (second / "model.bin").read_bytes() == (first / "model.bin").read_bytes()
