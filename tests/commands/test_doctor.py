"""The doctor: what is well is told as well, and what is wrong comes with what cures it."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from pipeline import doctor
from pipeline.config import Config
from pipeline.hardware.machine import Machine
from pipeline.hardware.network import PORT
from tests.kit.experiment import ROOT, Experiment, clean_environment, settings
from tests.unit.doctor.test_network import listening

LIMIT_SECONDS = 5
# A container that runs these tests may truly have little, as Docker gives it.
LITTLE = shutil.disk_usage("/dev/shm").total < doctor.SHARED_BYTES
# Another user, who may read all, as our Python may lie in root's home.
STRANGER = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


def line(said: str, kind: str, words: str) -> str:
    """The one line of a kind that holds some words."""
    found = [one for one in said.splitlines() if one.startswith(f"{kind:<7}") and words in one]
    assert len(found) == 1, said
    return found[0]


def ask(experiment: Experiment, *words: str, before: list[str] | None = None, **environment: str) -> str:
    """What the doctor says of an experiment with which something is wrong."""
    command = [*(before or []), sys.executable, "-m", "pipeline", "doctor", "--params", str(experiment.params), *words]
    variables = clean_environment() | environment
    started_at = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - started_at < LIMIT_SECONDS
    assert ended.returncode == 4, ended.stdout + ended.stderr
    return ended.stdout


def test_nothing_is_wrong_with_a_small_experiment_and_nothing_heavy_is_imported(experiment: Experiment) -> None:
    started_at = time.monotonic()
    said = experiment.run("doctor", PYTHONPROFILEIMPORTTIME="1", expect=4 if LITTLE else 0)
    assert time.monotonic() - started_at < LIMIT_SECONDS
    findings = [one for one in said.splitlines() if not one.startswith("import time:")]
    assert len(findings) >= 9
    wrong = [one for one in findings if not one.startswith(("ok     ", "note   "))]
    assert len(wrong) == LITTLE
    assert all("/dev/shm" in one for one in wrong)
    assert re.search(r"\| +pipeline\.tracking\.mirror_state$", said, re.MULTILINE)
    assert not re.search(r"\| +(torch|mlflow|dvc)$", said, re.MULTILINE)


def test_all_that_is_wrong_is_told_in_five_seconds_and_no_password_with_it(experiment: Experiment) -> None:
    experiment.set(dist__backend="nccl")
    with listening() as silent, listening("0.0.0.0", PORT):
        uri = f"http://me:secret@127.0.0.1:{silent}"
        leader = "no-such-machine.invalid:80"
        said = ask(experiment, "--leader", leader, MLFLOW_TRACKING_URI=uri, CUDA_VISIBLE_DEVICES="")
    assert "set backend: gloo" in line(said, "wrong", "nccl needs GPUs")
    assert "python -m pipeline lead --port" in line(said, "wrong", f"port {PORT} is taken")
    assert "python -m pipeline sync" in line(said, "wrong", f"http://127.0.0.1:{silent} (no answer in time)")
    assert "/etc/hosts" in line(said, "wrong", "the leader's name, no-such-machine.invalid")
    assert "secret" not in said


def test_a_question_without_an_end_is_told_and_holds_nobody_up(experiment: Experiment) -> None:
    pipe = experiment.folder / "gitconfig"
    os.mkfifo(pipe)
    said = ask(experiment, GIT_CONFIG_GLOBAL=str(pipe))
    line(said, "wrong", "git: no answer")


def test_without_git_and_docker_there_are_notes_and_nothing_wrong(experiment: Experiment) -> None:
    said = experiment.run("doctor", PATH=str(experiment.folder), expect=4 if LITTLE else 0)
    line(said, "note", "receipts will name none")
    line(said, "note", "no docker here")


def test_a_folder_of_another_user_is_told_with_its_owner(experiment: Experiment) -> None:
    for folder in (experiment.folder / "models", experiment.folder):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o555)
    as_root = os.geteuid() == 0
    said = ask(experiment, before=STRANGER if as_root else [])
    mine, me = f"{os.getuid()}:{os.getgid()}", 1234 if as_root else os.getuid()
    both = f"{experiment.folder} {experiment.folder}/models"
    found = line(said, "wrong", f"{both} cannot be written: the owner is {mine}, this is uid {me}")
    assert ("sudo chown -R 1234:1234 " if as_root else f"chmod u+rwx {both}") in found
    line(said, "wrong", f"{experiment.folder}/mlflow.db cannot be written as uid {me}")


def test_a_repository_that_git_does_not_trust_is_trusted_after_the_cure() -> None:
    # Not below pytest's folder, where another user finds nothing.
    with tempfile.TemporaryDirectory() as name, listening("0.0.0.0", PORT):
        folder = Path(name).resolve()
        folder.chmod(0o755)
        (folder / "home").mkdir()
        subprocess.run(["git", "init", "--quiet", name], check=True)
        as_root = os.geteuid() == 0
        variables = {"HOME": f"{folder}/home", "GIT_CONFIG_NOSYSTEM": "1"}
        if not as_root:
            # Who is not root cannot give a folder away; git then only takes it for another's.
            variables["GIT_TEST_ASSUME_DIFFERENT_OWNER"] = "1"
        experiment = Experiment(folder).set()
        before = ask(experiment, before=STRANGER if as_root else [], **variables)
        cure = line(before, "wrong", f"git does not trust {folder},").partition(": ")[2]
        subprocess.run(cure, shell=True, check=True, env=os.environ | variables)
        after = ask(experiment, before=STRANGER if as_root else [], **variables)
        assert f"git does not trust {folder}," not in after


def test_ranks_that_share_gpus_are_wrong_and_the_cure_is_the_same_experiment() -> None:
    config = Config.model_validate(settings(dist__world_size=4, dist__batch_size_per_gpu=16, dist__lanes_per_rank=[1, 1, 1, 1]))
    (found,) = doctor.ranks(config, Machine(["H200"] * 3, 9, "cpu", True, 13000))
    assert found.kind == "wrong"
    changes = yaml.safe_load("{" + found.cure.removeprefix("set dist.") + "}")
    assert changes == {"world_size": 2, "batch_size_per_gpu": 32, "lanes_per_rank": None}
    cured = Config.model_validate(config.model_dump() | {"dist": config.dist.model_dump() | changes})
    assert cured.identity("", "", "") == config.identity("", "", "")
    assert doctor.ranks(cured, Machine(["H200"] * 3, 9, "cpu", True, 13000))[0].kind == "ok"


def test_more_threads_than_cores_are_a_note() -> None:
    cores = len(os.sched_getaffinity(0))
    (found,) = doctor.ranks(Config.model_validate(settings(dist__threads_per_rank=cores)), Machine([], 0, "cpu", True))
    assert (found.kind, found.cure) == ("note", "set dist.world_size: 1, batch_size_per_gpu: 96")


def test_a_disk_without_room_is_wrong_and_named(tmp_path: Path) -> None:
    assert doctor.disk(tmp_path / "runs", 1).kind == "ok"
    found = doctor.disk(tmp_path / "runs", 1 << 60)
    assert found.kind == "wrong"
    assert f"{tmp_path}/runs" in found.text
    assert subprocess.run(found.cure.removeprefix("see what can go with "), shell=True).returncode == 0


@pytest.mark.parametrize(
    ("own", "file"),
    [("0::/a/b", "a/memory.max"), ("4:cpu,memory:/a/b", "memory/a/memory.limit_in_bytes"), ("4:memory:/a", "memory/memory.limit_in_bytes")],
)
def test_the_memory_of_a_control_group_is_a_note_where_it_is_little(tmp_path: Path, own: str, file: str) -> None:
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{own}\n")
    for path, limit in ((tmp_path / file, 1 << 30), (tmp_path / "a/b/memory.max", "max")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    limit = doctor.memory_limit(tmp_path, tmp_path / "own")
    assert limit == 1 << 30
    two, four = (Config.model_validate(settings(dist__world_size=size)).dist for size in (1, 4))
    assert doctor.memory(two, limit) == []
    (found,) = doctor.memory(four, limit)
    assert found.kind == "note"
    assert doctor.memory(four, None) == []


@pytest.mark.docker
def test_compose_is_told_by_its_version_and_an_old_one_is_wrong() -> None:
    assert doctor.compose().kind == "ok"
    found = doctor.compose((99, 0))
    assert found.kind == "wrong"
    assert "is older than 99.0" in found.text


@pytest.mark.docker
def test_a_container_without_room_is_told_and_one_with_room_is_well(experiment: Experiment, image: str) -> None:
    def inside(*words: str, program: tuple[str, ...] = ("doctor", "--params", "/e/params.yaml"), expect: int = 0) -> str:
        command = ["docker", "run", "--rm", f"--volume={experiment.folder}:/e", *words, image, *program]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == expect, ended.stdout + ended.stderr
        return ended.stdout

    inside("--user=0", program=("sh", "-c", "mkdir /e/models /e/runs && chmod 755 /e && chown -R 1000:1000 /e && touch /e/models/old"))
    try:
        said = inside("--memory=1g", "--tmpfs=/e/runs:size=100m,mode=755,uid=0", expect=4)
        assert "docker run --shm-size=1g" in line(said, "wrong", "/dev/shm has 64 MiB")
        assert "--memory=4g" in line(said, "note", "1024 MiB of memory to 2 ranks")
        line(said, "wrong", "0.1 GiB free for /e/runs, and a training needs 2.0")
        assert "on the host" in line(said, "wrong", "the owner is 0:0, this is uid 1000")
        assert "sudo chown -R 1000:1000 ." in line(said, "note", "root's in a folder of uid 1000")
        said = inside("--user=1234:1234", "--shm-size=1g", expect=4)
        assert "env UID=1000 GID=1000 docker compose up" in line(
            said, "wrong", "/e /e/runs /e/models cannot be written: the owner is 1000:1000"
        )
        read_only = f"-v={experiment.folder}:/closed:ro"
        said = inside(read_only, program=("doctor", "--params", "/closed/params.yaml"), expect=4)
        assert "without :ro" in line(said, "wrong", "/closed /closed/runs /closed/models cannot be written: it is mounted read-only")
        said = inside("--shm-size=1g")
        line(said, "ok", "/dev/shm has 1024 MiB")
        line(said, "note", "/e/models/old is root's in a folder of uid 1000")
    finally:
        inside("--user=0", program=("chown", "-R", f"{os.getuid()}:{os.getgid()}", "/e"))
