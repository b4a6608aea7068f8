"""The same job over containers, killed and stopped, with either store: always the bits of a run outside."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.kit.compose import IMAGE, USER, Project, sh
from tests.kit.documents import commands, needs_docker, runnable
from tests.kit.experiment import SMALL, settings

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

LONG = settings(data__name="synthetic:6000", train__epochs=12, dist__batch_size_per_gpu=96)
THREE = {"world_size": 3, "batch_size_per_gpu": 64, "lanes": 4, "lanes_per_rank": [1, 2, 1]}


def test_every_placement_ends_in_the_bits_of_a_run_outside(project: Callable[..., Project], outside: Callable[..., str]) -> None:
    expected = outside(SMALL)
    # On two: `make up`, below.
    three = project("three").set(SMALL | {"dist": THREE})
    three.compose("up", WORKERS="2")
    assert three.receipt()["placement"] == {"world_size": 3, "nodes": 3, "backend": "gloo", "lanes_per_rank": [1, 2, 1]}
    assert three.receipt()["weights_sha256"] == expected
    one = project("one").set(SMALL)
    one.compose("run", "--rm", "leader", "lead", "--workers", "0", "dvc", "repro")
    assert one.receipt()["placement"]["nodes"] == 1
    assert one.receipt()["weights_sha256"] == expected


def test_every_container_command_of_the_documents_works(project: Callable[..., Project], outside: Callable[..., str]) -> None:
    job = project("readme").set(SMALL)
    job.environment |= {"COMPOSE_PROJECT_NAME": job.name}
    found = [one for one in commands() if needs_docker(one)]
    asked = {"docker compose up --build", "make up", "docker compose run --rm leader lead --workers 0 dvc repro"}
    assert asked | {"docker compose down --volumes"} <= set(found)
    for command in found:
        # As the folder's owner, who is another in this test than the one who calls.
        words = runnable(command).replace("$(id -u)", str(USER)).replace("$(id -g)", str(USER)).replace(" lockstep $", f" {IMAGE} $")
        said = sh("sh", "-c", words, cwd=job.folder, env=job.environment)
        sh("chown", "-R", f"{USER}:{USER}", str(job.folder))
        check(job, command, said, outside)
    assert json.loads((job.folder / "experiment" / "models" / "receipt.json").read_text())["weights_sha256"] == outside(SMALL)


def check(job: Project, command: str, said: str, outside: Callable[..., str]) -> None:
    """What the documents say about a command."""
    if command.endswith("doctor"):
        assert "wrong" not in said
    if command == "make up":
        assert job.receipt()["weights_sha256"] == outside(SMALL)
        assert job.exit_codes() == {"leader": 0, "worker": 0}
        assert len(job.runs()) == 1
    if command.startswith("WORKERS=3"):
        assert len(job.compose("ps", "--all", "--quiet", "worker").split()) == 3
    if command.startswith("COMMAND="):
        level = job.folder / "levels" / "containers"
        receipt = json.loads((level / "models" / "receipt.json").read_text())
        assert receipt["placement"]["nodes"] == 2
        assert receipt["weights_sha256"] == outside(yaml.safe_load((level / "params.yaml").read_text()))
    if command == "docker compose logs leader":
        assert "up to date" in said
    if command == "docker compose down --volumes":
        assert job.name not in sh("docker", "volume", "ls", "--quiet")
    if command.startswith("for stage in"):
        assert "test accuracy" in said


def test_a_postgresql_server_keeps_three_runs_at_once(project: Callable[..., Project], outside: Callable[..., str]) -> None:
    job = project("postgres", "docker-compose.postgres.yml").set(SMALL)
    job.compose("build", "postgres")
    job.compose("up")
    assert job.receipt()["weights_sha256"] == outside(SMALL)
    for seed in (11, 12, 13):
        (job.folder / f"seed-{seed}").mkdir()
        (job.folder / f"seed-{seed}" / "params.yaml").write_text(yaml.safe_dump(SMALL | {"seed": seed}))
    sh("chown", "-R", f"{USER}:{USER}", str(job.folder))
    at_once = []
    for seed in (11, 12, 13):
        params = f"/lockstep/seed-{seed}/params.yaml"
        both = f"python -m pipeline prepare --params {params} && exec python -m pipeline train --params {params}"
        words = job.words("run", "--rm", "--no-deps", "leader", "sh", "-c", both)
        at_once.append(
            subprocess.Popen(words, cwd=job.folder, env=job.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    for process in at_once:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
        assert "MLflow does not have all of it" not in said
    assert [run["info"]["status"] for run in job.runs()] == ["FINISHED"] * 4
    for seed in (11, 12, 13):
        receipt = json.loads((job.folder / f"seed-{seed}" / "models" / "receipt.json").read_text())
        (run,) = [one for one in job.runs() if {"key": "lockstep.fingerprint", "value": receipt["fingerprint"]} in one["data"]["tags"]]
        steps = [one["step"] for one in job.api(f"metrics/get-history?run_id={run['info']['run_id']}&metric_key=train/loss")["metrics"]]
        (journal,) = job.folder.glob(f"seed-{seed}/runs/*/journal.jsonl")
        lines = map(json.loads, journal.read_text().splitlines())
        assert sorted(steps) == [line["step"] for line in lines if "train/loss" in line.get("values", {})]
    psql = ("psql", "--host=127.0.0.1", "--username=mlflow", "-tAc", "select count(*) from runs where status = 'FINISHED'", "mlflow")
    assert job.compose("exec", "-T", "-e", "PGPASSWORD=secret", "postgres", *psql).strip() == "4"


@pytest.mark.fault(2, "docker kill of the worker, of the leader")
@pytest.mark.fault(3, "docker compose stop: SIGTERM to pid 1 of each container")
def test_what_is_killed_or_stopped_goes_on_to_the_same_bits_in_one_run(
    project: Callable[..., Project], outside: Callable[..., str]
) -> None:
    job = project("killed").set(LONG)
    job.compose("up", "--detach")
    job.wait_for_steps(40)
    sh("docker", "kill", job.container("worker"))
    time.sleep(3)
    assert "leader" not in job.exit_codes()
    job.compose("start", "worker")
    job.wait_for_steps(80)
    sh("docker", "kill", job.container("leader"))
    assert job.wait("worker", 30) == 6
    job.compose("up", "--detach")
    job.wait_for_steps(120)
    started_at = time.monotonic()
    job.compose("stop")
    assert time.monotonic() - started_at < 60
    assert job.exit_codes() == {"leader": 75, "worker": 75, "mlflow": 0}
    status = job.status()
    assert (status["outcome"], status["exit_code"]) == ("stopped", 75)
    assert (job.folder / Path(status["checkpoint"]).relative_to("/lockstep")).exists()
    job.compose("up", "--detach", "mlflow")
    assert [run["info"]["status"] for run in job.runs()] == ["KILLED"]
    job.compose("up")
    assert job.exit_codes() == {"leader": 0, "worker": 0}
    assert [run["info"]["status"] for run in job.runs()] == ["FINISHED"]
    assert job.receipt()["weights_sha256"] == outside(LONG)


def test_a_worker_that_dies_comes_back_by_itself_where_a_restart_policy_says_so(
    project: Callable[..., Project], outside: Callable[..., str]
) -> None:
    job = project("restart").set(LONG)
    job.compose("up", "--detach", RESTART="on-failure:3")
    job.wait_for_steps(40)
    # As a machine would end it: the engine did not ask for it, so its policy counts.
    pid = int(sh("docker", "inspect", "--format", "{{.State.Pid}}", job.container("worker")))
    os.kill(pid, 9)
    assert job.wait("leader") == 0
    assert job.receipt()["weights_sha256"] == outside(LONG)
