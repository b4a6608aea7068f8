"""The same job in containers, on a real engine: the files of a clone, owned by a user who is not root, and Compose."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import Config
from tests.conftest import ROOT, Experiment, clean_environment, clone_of, settings

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

USER = 1234
IMAGE = "lockstep-test"
# With a global batch that three ranks can share.
SMALL = settings(data__name="synthetic:3000", dist__batch_size_per_gpu=96)
LONG = settings(data__name="synthetic:6000", train__epochs=12, dist__batch_size_per_gpu=96)
THREE = {"world_size": 3, "batch_size_per_gpu": 64, "lanes": 4, "lanes_per_rank": [1, 2, 1]}


def sh(*words: str, expect: int | None = 0, **options: Any) -> str:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert expect is None or done.returncode == expect, f"{' '.join(words)}: {done.returncode}\n{done.stdout}"
    return done.stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@pytest.fixture(scope="session")
def image() -> str:
    """The image of this tree."""
    sh("docker", "build", "--quiet", "--tag", IMAGE, str(ROOT))
    return IMAGE


class Project:
    """A clone that belongs to another user, and Compose on it."""

    def __init__(self, folder: Path, *files: str):
        self.folder, self.port, self.name = folder, free_port(), f"test{os.getpid()}-{folder.name}"
        self._files = ["docker-compose.yml", *files]
        self.environment = clean_environment() | {
            "UID": str(USER),
            "GID": str(USER),
            "LOCKSTEP_NAME": IMAGE,
            "MLFLOW_PORT": str(self.port),
            "MEMORY": "6g",
            "POSTGRES_PASSWORD": "secret",
        }

    def set(self, values: dict[str, Any]) -> "Project":
        # All keys: DVC misses those that a stage watches.
        (self.folder / "params.yaml").write_text(yaml.safe_dump(Config.model_validate(values).model_dump()))
        return self

    def words(self, *words: str) -> list[str]:
        return ["docker", "compose", "--project-name", self.name, *(word for file in self._files for word in ("--file", file)), *words]

    def compose(self, *words: str, expect: int | None = 0, **environment: str) -> str:
        return sh(*self.words(*words), expect=expect, cwd=self.folder, env=self.environment | environment)

    def exit_codes(self) -> dict[str, int]:
        lines = self.compose("ps", "--all", "--format", "json").splitlines()
        return {one["Service"]: one["ExitCode"] for one in map(json.loads, lines) if one["State"] == "exited"}

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).split()[0]

    def wait(self, service: str, seconds: float = 300) -> int:
        until = time.monotonic() + seconds
        while service not in (codes := self.exit_codes()):
            assert time.monotonic() < until, self.compose("logs", "--tail=20")
            time.sleep(0.5)
        return codes[service]

    def wait_for_steps(self, count: int) -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            for journal in self.folder.glob("runs/*/journal.jsonl"):
                if journal.read_text().count("train/loss") >= count:
                    return
            time.sleep(0.1)
        raise AssertionError(self.compose("logs", "--tail=20"))

    def receipt(self) -> dict[str, Any]:
        return json.loads((self.folder / "models" / "receipt.json").read_text())

    def status(self) -> dict[str, Any]:
        (path,) = self.folder.glob("runs/*/status.json")
        return json.loads(path.read_text())

    def api(self, path: str, **asked: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/2.0/mlflow/{path}", headers={"Content-Type": "application/json"}
        )
        if asked:
            request.data = json.dumps(asked).encode()
        until = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return json.loads(answer.read())
            except (OSError, urllib.error.URLError):
                assert time.monotonic() < until
                time.sleep(0.5)

    def runs(self) -> list[dict[str, Any]]:
        ids = [one["experiment_id"] for one in self.api("experiments/search?max_results=100")["experiments"]]
        return self.api("runs/search", experiment_ids=ids).get("runs", [])


@pytest.fixture
def project(image: str, tmp_path: Path) -> Iterator[Callable[..., Project]]:
    """`project("name")`: a clone with an environment of its own, taken down in the end."""
    made: list[Project] = []

    def make(name: str, *files: str) -> Project:
        made.append(Project(clone_of(tmp_path / name), *files))
        # Owned by one who is not root, with all that leads there open to them.
        sh("chown", "-R", f"{USER}:{USER}", str(tmp_path / name))
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
                folder.chmod(0o755)
        return made[-1]

    yield make
    for one in made:
        one.compose("down", "--volumes", "--timeout=5", expect=None)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], str]:
    """The digest that an experiment ends with outside containers."""
    known: dict[str, str] = {}

    def digest(values: dict[str, Any]) -> str:
        key = json.dumps(values)
        if key not in known:
            one = Experiment(tmp_path_factory.mktemp("outside"))
            one.params.write_text(yaml.safe_dump(values))
            one.run("prepare")
            one.run("train")
            known[key] = one.json("models/receipt.json")["weights_sha256"]
        return known[key]

    return digest


def test_compose_up_runs_it_all_as_the_caller_and_a_second_one_ends_by_itself(project: Callable[..., Project]) -> None:
    job = project("whole")
    up = subprocess.Popen(job.words("up"), cwd=job.folder, env=job.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    job.wait_for_steps(5)
    for service in ("mlflow", "leader", "worker"):
        is_hardened(job.container(service))
    said, _ = up.communicate(timeout=600)
    assert up.returncode == 0, said
    assert job.exit_codes() == {"leader": 0, "worker": 0}
    assert json.loads((job.folder / "metrics" / "eval.json").read_text())["accuracy"] >= 0.90
    opens_on_the_loopback_alone(job)
    receipt = job.receipt()
    assert (receipt["placement"]["nodes"], receipt["placement"]["world_size"]) == (2, 2)
    assert receipt["git"]["commit"] == sh("git", "rev-parse", "HEAD", cwd=job.folder, user=USER).strip()
    assert receipt["image"].startswith("content:")
    owners = {path.lstat().st_uid for path in job.folder.rglob("*")}
    assert owners == {USER}
    started_at = time.monotonic()
    assert "Data and pipelines are up to date" in job.compose("up")
    assert time.monotonic() - started_at < 30
    assert job.exit_codes() == {"leader": 0, "worker": 0}
    assert len(job.runs()) == 1


def is_hardened(container: str) -> None:
    """Not root, nothing to gain, nothing to write but its volumes, and no socket of the engine's."""
    (found,) = json.loads(sh("docker", "inspect", container))
    host = found["HostConfig"]
    assert found["Config"]["User"] == f"{USER}:{USER}"
    assert host["ReadonlyRootfs"]
    assert host["Init"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["Memory"] > 0
    assert host["LogConfig"]["Config"]["max-size"] == "10m"
    assert not [mount for mount in found["Mounts"] if "docker.sock" in mount["Source"]]
    assert {line.split()[0] for line in sh("docker", "top", container, "-eo", "uid,pid").splitlines()[1:]} == {str(USER)}
    assert "Read-only file system" in sh("docker", "exec", container, "touch", "/opt/x", expect=1)


def opens_on_the_loopback_alone(job: Project) -> None:
    """One FINISHED run with artifacts that open; nobody else is answered."""
    (run,) = job.runs()
    assert run["info"]["status"] == "FINISHED"
    tags = {one["key"]: one["value"] for one in run["data"]["tags"]}
    assert tags["lockstep.image"] == job.receipt()["image"]
    assert tags["mlflow.source.git.commit"] == job.receipt()["git"]["commit"]
    with urllib.request.urlopen(f"http://127.0.0.1:{job.port}/", timeout=10) as page:
        assert b"<title>MLflow</title>" in page.read()
    address = f"http://127.0.0.1:{job.port}/get-artifact?path=receipt.json&run_uuid={run['info']['run_id']}"
    with urllib.request.urlopen(address, timeout=10) as artifact:
        assert json.loads(artifact.read())["weights_sha256"] == job.receipt()["weights_sha256"]
    others = {line.split()[3].split("/")[0] for line in sh("ip", "-4", "-o", "address").splitlines()} - {"127.0.0.1"}
    assert others
    for other in others:
        with pytest.raises(OSError), socket.create_connection((other, job.port), timeout=3):
            pass


def test_every_placement_ends_in_the_bits_of_a_run_outside(project: Callable[..., Project], outside: Callable[..., str]) -> None:
    expected = outside(SMALL)
    two = project("two").set(SMALL)
    two.compose("up")
    assert two.exit_codes() == {"leader": 0, "worker": 0}
    assert two.receipt()["weights_sha256"] == expected
    three = project("three").set(SMALL | {"dist": THREE})
    three.compose("up", WORKERS="2")
    assert three.receipt()["placement"] == {"world_size": 3, "nodes": 3, "backend": "gloo", "lanes_per_rank": [1, 2, 1]}
    assert three.receipt()["weights_sha256"] == expected
    one = project("one").set(SMALL)
    one.compose("run", "--rm", "leader", "dvc", "repro")
    assert one.receipt()["placement"]["nodes"] == 1
    assert one.receipt()["weights_sha256"] == expected


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


def test_without_a_network_and_without_a_checkout_a_container_trains(image: str, tmp_path: Path, outside: Callable[..., str]) -> None:
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(SMALL))
    shutil.chown(tmp_path, 4321, 4321)
    alone = ["docker", "run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--user=4321:4321"]
    for stage in ("prepare", "train", "evaluate"):
        said = sh(*alone, f"--volume={tmp_path}:/experiment", image, stage, "--params=/experiment/params.yaml")
    assert "test accuracy" in said
    receipt = json.loads((tmp_path / "models" / "receipt.json").read_text())
    assert receipt["weights_sha256"] == outside(SMALL)
    assert receipt["image"].startswith("content:")


def test_fashion_mnist_is_in_the_image(image: str, tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    shutil.chown(tmp_path, 4321, 4321)
    said = sh(
        "docker",
        "run",
        "--rm",
        "--network=none",
        "--user=4321:4321",
        f"--volume={tmp_path}:/e",
        image,
        "prepare",
        "--params=/e/params.yaml",
    )
    assert "54000 train, 6000 validation, 10000 test" in said


def test_a_folder_of_another_user_is_refused_with_the_uid_that_works(project: Callable[..., Project]) -> None:
    job = project("other")
    job.environment |= {"UID": "4321", "GID": "4321"}
    said = job.compose("up", "leader", "worker", expect=None)
    assert f"UID={USER} GID={USER} docker compose up" in said
    assert job.exit_codes() == {"leader": 4, "worker": 4}


def test_a_change_of_code_rebuilds_in_seconds_and_two_builds_install_the_same(image: str, tmp_path: Path) -> None:
    tree = clone_of(tmp_path / "tree")
    with (tree / "pipeline" / "train.py").open("a") as code:
        code.write("# changed\n")
    started_at = time.monotonic()
    sh("docker", "build", "--quiet", "--tag", f"{image}:changed", "--build-arg", "REVISION=abc", str(tree))
    assert time.monotonic() - started_at < 10
    assert "# changed" in sh("docker", "run", "--rm", f"{image}:changed", "tail", "-1", "pipeline/train.py")
    label = '{{index .Config.Labels "org.opencontainers.image.revision"}}'
    assert sh("docker", "inspect", "--format", label, f"{image}:changed").strip() == "abc"
    sh("docker", "build", "--quiet", "--no-cache", "--tag", f"{image}:again", str(tree))
    contents = {sh("docker", "run", "--rm", name, "cat", "/etc/lockstep/image") for name in (f"{image}:changed", f"{image}:again")}
    assert len(contents) == 1
