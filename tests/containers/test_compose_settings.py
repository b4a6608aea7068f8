"""Compose: settings reach the containers; Ctrl-C, `make up` and `down --volumes` do what the documents say."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.compose import IMAGE, USER, Project, sh
from tests.kit.experiment import SMALL, settings

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

LONG = settings(data__name="synthetic:6000", train__epochs=12, dist__batch_size_per_gpu=96)
GIB = 1 << 30


def owners(folder: Path) -> set[tuple[int, int]]:
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in folder.rglob("*")}


def memory_limits(job: Project) -> dict[str, int]:
    """The memory limit of each service's container, in bytes."""
    job.compose("create", "--no-build")
    services = ("mlflow", "leader", "worker")
    return {one: int(sh("docker", "inspect", "--format", "{{.HostConfig.Memory}}", job.container(one))) for one in services}


def test_memory_is_what_was_set_and_else_16_gb(project: Callable[..., Project]) -> None:
    job = project("memory")
    job.environment["MEMORY"] = "3g"
    assert memory_limits(job) == {"mlflow": 2 * GIB, "leader": 3 * GIB, "worker": 3 * GIB}
    del job.environment["MEMORY"]
    assert memory_limits(job) == {"mlflow": 2 * GIB, "leader": 16 * GIB, "worker": 16 * GIB}


def test_mlflows_store_is_where_it_was_set(project: Callable[..., Project]) -> None:
    job = project("store")
    job.compose("up", "--detach", "mlflow", MLFLOW_BACKEND_STORE_URI="sqlite:////mlflow/elsewhere.db")
    job.api("experiments/create", name="kept elsewhere")
    read = 'import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute("select name from experiments order by name").fetchall())'
    assert "kept elsewhere" in job.compose("exec", "-T", "mlflow", "python", "-c", read, "/mlflow/elsewhere.db")
    # Made by the server's start script, and never used.
    assert job.compose("exec", "-T", "mlflow", "stat", "--format=%s", "/mlflow/mlflow.db").strip() == "0"


def test_make_up_writes_files_as_the_folders_owner_and_dockers_id_into_the_receipt(project: Callable[..., Project]) -> None:
    job = project("make").set(SMALL)
    sh("chown", "-R", f"{USER}:4321", str(job.folder))
    del job.environment["UID"], job.environment["GID"]
    # The owner would call it; we are another user, whom git trusts only if it is told so.
    trusted = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    sh("make", "up", cwd=job.folder, env=job.environment | trusted | {"COMPOSE_PROJECT_NAME": job.name})
    assert job.exit_codes() == {"leader": 0, "worker": 0}
    assert owners(job.folder) == {(USER, 4321)}
    (image,) = json.loads(sh("docker", "image", "inspect", IMAGE))
    assert job.receipt()["image"] == image["Id"]
    commit = sh("git", "-c", "safe.directory=*", "rev-parse", "HEAD", cwd=job.folder).strip()
    assert image["Config"]["Labels"]["org.opencontainers.image.revision"] == job.receipt()["git"]["commit"] == commit
    assert len(job.runs()) == 1


def test_without_uid_it_runs_as_1000_and_ctrl_c_of_up_is_resumable_and_down_volumes_forgets_the_runs(
    project: Callable[..., Project],
) -> None:
    job = project("default").set(LONG)
    sh("chown", "-R", "1000:1000", str(job.folder))
    del job.environment["UID"], job.environment["GID"]
    up = subprocess.Popen(job.words("up"), cwd=job.folder, env=job.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    job.wait_for_steps(40)
    up.send_signal(signal.SIGINT)
    output, _ = up.communicate(timeout=180)
    assert {"leader": 75, "worker": 75}.items() <= job.exit_codes().items(), output
    kept = job.status()["checkpoint"]
    assert (job.folder / Path(kept).relative_to("/lockstep")).exists()
    assert f"Kept: {kept}." in job.compose("logs", "leader")
    job.compose("up")
    assert job.exit_codes() == {"leader": 0, "worker": 0}
    assert [run["info"]["status"] for run in job.runs()] == ["FINISHED"]
    assert owners(job.folder) == {(1000, 1000)}
    resumed = [line for line in journal(job) if line["kind"] == "started" and line["stage"] == "train"]
    assert len(resumed) == 2
    job.compose("down", "--volumes")
    job.compose("up", "--detach", "mlflow")
    assert job.runs() == []
    job.compose("run", "--rm", "leader", "sync")
    assert job.runs() == []


def journal(job: Project) -> list[dict[str, str]]:
    (path,) = job.folder.glob("runs/*/journal.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]
