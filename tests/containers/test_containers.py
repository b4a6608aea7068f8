"""A container and what it may do: nobody is root, nothing is open, nothing is missing."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from bench.made_images import packed
from pipeline.tracking.journal import last, read
from tests.kit.checkout import clone_of
from tests.kit.compose import USER, Project, sh
from tests.kit.experiment import SMALL, settings
from tests.kit.waiting import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]
Note = Callable[[str, object], None]


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
    assert receipt["git"]["commit"] == sh("git", "-c", "safe.directory=*", "rev-parse", "HEAD", cwd=job.folder).strip()
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


@pytest.mark.fault(26, "a container without a network: no name resolves")
@pytest.mark.fault(25, "64 MB of /dev/shm, a read-only root, another uid, no network")
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


@pytest.fixture
def too_little(image: str, tmp_path: Path) -> list[str]:
    """`docker run` with less memory than a step needs."""
    changes = {"model__name": "resnet18", "dist__batch_size_per_gpu": 1024, "dist__world_size": 1, "dist__lanes": 1}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(settings(data__name="synthetic:3000", **changes)))
    shutil.chown(tmp_path, USER, USER)
    small = ["docker", "run", "--rm", "--memory=1500m", "--memory-swap=1500m", f"--user={USER}:{USER}", f"--volume={tmp_path}:/e", image]
    sh(*small, "prepare", "--params=/e/params.yaml")
    return small


# Mostly rank 0 in step 0.
LOWER = re.compile(r"(rank 0|a rank) ran out of memory (in step 0|before its first step); lower dist\.batch_size_per_gpu \(1024\)")


@pytest.mark.fault(7, "docker run --memory: the kernel ends a rank, again and again in its first step")
def test_a_container_with_too_little_memory_says_what_to_lower(too_little: list[str], record_property: Note) -> None:
    said = sh(*too_little, "train", "--params=/e/params.yaml", expect=4)
    # Rarely, before the rank's memory is free, the kernel ends torchrun too, and nothing starts again.
    starts = 1 + said.count("starting again from the beginning")
    assert len(LOWER.findall(said)) == starts <= 3, said
    record_property("happened", f"{starts} starts, then exit 4: ran out of memory; lower dist.batch_size_per_gpu (1024)")


@pytest.mark.fault(7, "docker run --memory: the kernel ends torchrun first")
def test_a_container_where_torchrun_is_oom_killed_says_what_to_lower(too_little: list[str], record_property: Note) -> None:
    name = f"{too_little[-1]}-torchrun"
    words = [*too_little[:-1], f"--name={name}", too_little[-1], "train", "--params=/e/params.yaml"]
    train = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    processes = ["docker", "top", name, "-eo", "pid,args"]
    # When a rank is there, nothing is forked any more that inherits the agent's score.
    try:
        shown = until(lambda: found if "local rank 0" in (found := sh(*processes, expect=None)) else "", train)
        (agent,) = re.findall(r"(\d+) +\S+ -m pipeline.launch.agent ", shown)
        Path(f"/proc/{agent}/oom_score_adj").write_text("1000")
        said, _ = train.communicate(timeout=100)
    finally:
        sh("docker", "rm", "--force", name, expect=None)
    assert train.returncode == 4, said
    # Rank 0 is named where the kernel killed it, as before the score was written.
    assert [who for who, _ in LOWER.findall(said)][-1] == "a rank", said
    record_property("happened", "exit 4: ran out of memory; lower dist.batch_size_per_gpu (1024)")


SMALL_MODEL = """
from torch import nn

def build(channels: int, side: int, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(side), nn.Flatten(), nn.Linear(channels, num_classes))
"""


@pytest.mark.fault(7, "docker run --memory: a data set of three times as much is read once through")
def test_data_of_three_times_the_memory_train(image: str, tmp_path: Path) -> None:
    limit = 1200 * 2**20
    params = packed(tmp_path / "e", 3 * limit, 96)
    assert (tmp_path / "e" / "data" / "prepared" / "train-images.npy").stat().st_size > 2.99 * limit
    values = yaml.safe_load(params.read_text())
    values["model"] = {"name": "mine.py:build"}
    values["tracking"] = {}
    values["dist"]["batch_size_per_gpu"] = 128
    params.write_text(yaml.safe_dump(values))
    (tmp_path / "e" / "mine.py").write_text(SMALL_MODEL)
    sh("chown", "-R", f"{USER}:{USER}", str(tmp_path))
    held = [f"--memory={limit}", f"--memory-swap={limit}", f"--user={USER}:{USER}", f"--volume={tmp_path / 'e'}:/e"]
    sh("docker", "run", "--rm", *held, image, "train", "--params=/e/params.yaml")
    (journal,) = (tmp_path / "e").glob("runs/*/journal.jsonl")
    # Once, without a rank that was lost.
    assert [line["kind"] for line in read(journal) if line["kind"] in ("started", "finished", "failed")] == ["started", "finished"]
    assert last(journal, "finished")["step"] == 3 * limit // (3 * 96 * 96) // 128
    # pytest keeps folders.
    shutil.rmtree(tmp_path / "e" / "data")


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


@pytest.mark.fault(25, "a volume of another uid")
def test_a_folder_of_another_user_is_refused_with_the_uid_that_works(project: Callable[..., Project]) -> None:
    job = project("other")
    job.environment |= {"UID": "4321", "GID": "4321"}
    said = job.compose("up", "leader", "worker", expect=None)
    assert f"UID={USER} GID={USER} docker compose up" in said
    assert job.exit_codes() == {"leader": 4, "worker": 4}


@pytest.mark.system
def test_a_change_of_code_rebuilds_in_seconds_and_two_builds_install_the_same(image: str, tmp_path: Path) -> None:
    tree = clone_of(tmp_path / "tree")
    with (tree / "pipeline" / "train.py").open("a") as code:
        code.write("# changed\n")
    started_at = time.monotonic()
    try:
        sh("docker", "build", "--quiet", "--tag", f"{image}:changed", "--build-arg", "REVISION=abc", str(tree))
        assert time.monotonic() - started_at < 10
        assert "# changed" in sh("docker", "run", "--rm", f"{image}:changed", "tail", "-1", "pipeline/train.py")
        label = '{{index .Config.Labels "org.opencontainers.image.revision"}}'
        assert sh("docker", "inspect", "--format", label, f"{image}:changed").strip() == "abc"
        sh("docker", "build", "--quiet", "--no-cache", "--tag", f"{image}:again", str(tree))
        contents = {sh("docker", "run", "--rm", name, "cat", "/etc/lockstep/image") for name in (f"{image}:changed", f"{image}:again")}
        assert len(contents) == 1
    finally:
        # 7 GB each.
        sh("docker", "image", "rm", "--force", f"{image}:changed", f"{image}:again", expect=None)


def test_the_gpu_file_gives_all_gpus_to_one_container(project: Callable[..., Project]) -> None:
    job = project("all-gpus", "docker-compose.gpu.yml")
    for environment, expected in (
        ({}, ("nvidia", ["all"])),
        ({"GPU_DRIVER": "cdi", "GPUS": "nvidia.com/gpu=all"}, ("cdi", ["nvidia.com/gpu=all"])),
    ):
        services = json.loads(job.compose("config", "--format", "json", **environment))["services"]
        (device,) = services["leader"]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["device_ids"]) == expected
        # DVC alone would end at once where a container is stopped, and ranks with it.
        assert services["leader"]["command"] == ["lead", "--workers", "0", "dvc", "repro"]
        assert services["worker"]["deploy"]["replicas"] == 0


def test_the_other_gpu_file_gives_each_service_its_own(project: Callable[..., Project]) -> None:
    job = project("gpus", "docker-compose.gpu-each.yml")
    for driver, chosen in (("nvidia", {}), ("cdi", {"GPU_DRIVER": "cdi"})):
        services = json.loads(job.compose("config", "--format", "json", LEADER_GPUS="0", WORKER_GPUS="3", **chosen))["services"]
        for service, gpu in (("leader", "0"), ("worker", "3")):
            (device,) = services[service]["deploy"]["resources"]["reservations"]["devices"]
            assert (device["driver"], device["device_ids"], device["capabilities"]) == (driver, [gpu], ["gpu"])


def test_mlflows_store_serves_the_next_user_too(project: Callable[..., Project]) -> None:
    job = project("users")
    for uid in (str(USER), "4321"):
        job.compose("up", "--detach", "mlflow", UID=uid, GID=uid)
        job.api("experiments/create", name=f"of {uid}")
    assert {one["name"] for one in job.api("experiments/search?max_results=9")["experiments"]} >= {f"of {USER}", "of 4321"}
