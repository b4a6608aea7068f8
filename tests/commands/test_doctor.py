"""The doctor command: what is well is reported so, and what is wrong comes with its fix."""

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from pipeline import doctor
from pipeline.doctor import network
from pipeline.doctor.hardware import SHARED_BYTES
from tests.kit.compose import free_port
from tests.kit.driver import driver
from tests.kit.experiment import ROOT, Experiment, clean_environment
from tests.unit.doctor.test_network import listening

# It takes 0.4 s on an idle machine; importing torch or MLflow alone takes more than 1.2.
CPU_SECONDS = 1.2
needs_shared_memory = pytest.mark.skipif(shutil.disk_usage("/dev/shm").total < SHARED_BYTES, reason="/dev/shm is too small for ranks here")
# Another user, who can read everything, as our Python may lie in root's home.
STRANGER = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
# What libcuda says of a driver that does not match its kernel module, as after an update without a reboot.
BROKEN_DRIVER = """
int cuInit(unsigned flags) { return 803; }
int cuGetErrorString(int error, const char **text) { *text = "system has unsupported display driver / cuda driver combination"; return 0; }
"""


def line(output: str, kind: str, words: str) -> str:
    """Return the one line of a kind that contains some words."""
    found = [one for one in output.splitlines() if one.startswith(f"{kind:<7}") and words in one]
    assert len(found) == 1, output
    return found[0]


def seconds_of(command: list[str], variables: dict[str, str], expect: int) -> tuple[float, float, str]:
    """Run a command; returns how long it took, the CPU seconds of it and its children, and its output."""
    before, started_at = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)
    elapsed_seconds, after = time.monotonic() - started_at, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == expect, done.stdout + done.stderr
    return elapsed_seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def ask(experiment: Experiment, *words: str, before: list[str] | None = None, expect: int = 4, **environment: str) -> str:
    """Return what the doctor says of an experiment, in no more time than it promises on a machine as busy as this one."""
    command = [*(before or []), sys.executable, "-m", "pipeline", "doctor", "--params", str(experiment.params)]
    if "--port" not in words:
        words = (*words, "--port", str(free_port()))
    variables = clean_environment() | environment
    elapsed_seconds, cpu_seconds, output = seconds_of([*command, *words], variables, expect)
    start_seconds, _, _ = seconds_of([*command, "--help"], variables, 0)
    assert elapsed_seconds < doctor.LIMIT_SECONDS + 4 * start_seconds
    assert cpu_seconds < CPU_SECONDS
    return output


@needs_shared_memory
def test_nothing_is_wrong_with_a_small_experiment(experiment: Experiment) -> None:
    lines = ask(experiment, expect=0).splitlines()
    assert len(lines) >= 9
    assert all(one.startswith(("ok     ", "note   ")) for one in lines)
    for found in ("ok     no engine: one machine", f"ok     {experiment.folder}: files can be locked, replaced at once and synced"):
        assert found in lines


def test_nothing_heavy_is_imported(experiment: Experiment) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "pipeline", "doctor", "--params", str(experiment.params)]
    imported = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True).stderr
    assert re.search(r"\| +pipeline\.tracking\.mirror_state$", imported, re.MULTILINE)
    assert not re.search(r"\| +(torch|mlflow|dvc|requests)$", imported, re.MULTILINE)


def test_all_that_is_wrong_is_found_in_time_and_no_password_is_printed(experiment: Experiment) -> None:
    experiment.set(dist__backend="nccl")
    with listening() as silent, listening("0.0.0.0") as taken:
        uri = f"http://me:secret@127.0.0.1:{silent}"
        leader = "no-such-machine.invalid:80"
        output = ask(experiment, "--leader", leader, "--port", str(taken), MLFLOW_TRACKING_URI=uri, CUDA_VISIBLE_DEVICES="")
    assert "set backend: gloo" in line(output, "wrong", "nccl needs GPUs")
    assert "python -m pipeline lead --port" in line(output, "wrong", f"port {taken} is taken")
    assert "python -m pipeline sync" in line(
        output, "wrong", f"http://127.0.0.1:{silent} (the server at 127.0.0.1, port {silent}, does not"
    )
    assert "/etc/hosts" in line(output, "wrong", "the leader's name, no-such-machine.invalid")
    assert "secret" not in output


def test_a_check_that_never_returns_is_reported_and_delays_nothing(experiment: Experiment) -> None:
    pipe = experiment.folder / "gitconfig"
    os.mkfifo(pipe)
    line(ask(experiment, GIT_CONFIG_GLOBAL=str(pipe)), "wrong", "git: no answer")
    # Nor is the program that hung left behind.
    assert not [one.pid for one in psutil.process_iter(["cmdline"]) if str(experiment.folder) in (one.info["cmdline"] or [])]


@needs_shared_memory
def test_a_docker_that_takes_long_is_noted_and_nothing_is_wrong(experiment: Experiment) -> None:
    slow = experiment.folder / "slow" / "docker"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    output = ask(experiment, expect=0, PATH=f"{slow.parent}:{os.environ['PATH']}")
    assert "docker compose version" in line(output, "note", "Docker Compose: no answer in time")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here")
def test_a_broken_driver_is_wrong_unless_no_gpu_is_wanted(experiment: Experiment) -> None:
    (experiment.folder / "cuda.c").write_text(BROKEN_DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"], cwd=experiment.folder, check=True)
    broken = {"LD_LIBRARY_PATH": str(experiment.folder), "CUDA_VISIBLE_DEVICES": "0"}
    found = line(ask(experiment, **broken), "wrong", "GPUs: the GPU's driver does not work (cuInit failed with 803")
    assert found.endswith("see nvidia-smi, or set CUDA_VISIBLE_DEVICES= for CPUs")
    without = broken | {"CUDA_VISIBLE_DEVICES": ""}
    assert "wrong  GPUs" not in experiment.run("doctor", "--port", str(free_port()), **without)


def test_a_driver_that_takes_long_to_load_is_told_from_a_broken_one(experiment: Experiment) -> None:
    found = ask(experiment, **driver(experiment.folder / "driver", SECONDS=20))
    assert "nvidia-smi -pm 1" in line(found, "wrong", "GPUs: no answer in time")
    assert "wrong  memory" not in found


@pytest.mark.slow
def test_a_leader_is_told_from_one_that_is_still_starting(experiment: Experiment) -> None:
    port = free_port()
    leader = experiment.start("lead", "--workers", "1", "--port", str(port), "sleep", "100")
    try:
        until, answers = time.monotonic() + 60, set[str]()
        while (found := network.leader("127.0.0.1", port)).kind != "ok":
            answers.add(found.text)
            assert leader.poll() is None and time.monotonic() < until, found
        starting = f"what listens at 127.0.0.1:{port} does not answer as a leader"
        assert answers <= {f"no leader listens at 127.0.0.1:{port}", starting}
        assert starting in answers
        line(ask(experiment, "--leader", f"127.0.0.1:{port}", "--port", str(port)), "ok", f"the leader 127.0.0.1:{port} answers")
    finally:
        leader.kill()
        leader.communicate()


@needs_shared_memory
def test_without_git_and_docker_there_are_notes_and_nothing_is_wrong(experiment: Experiment) -> None:
    output = ask(experiment, expect=0, PATH=str(experiment.folder))
    line(output, "note", "receipts will name no commit")
    line(output, "note", "no docker here")


def test_a_folder_of_another_user_is_reported_with_its_owner(experiment: Experiment) -> None:
    for folder in (experiment.folder / "models", experiment.folder):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o555)
    as_root = os.geteuid() == 0
    output = ask(experiment, before=STRANGER if as_root else [])
    mine, me = f"{os.getuid()}:{os.getgid()}", 1234 if as_root else os.getuid()
    both = f"{experiment.folder} {experiment.folder}/models"
    found = line(output, "wrong", f"{both} cannot be written: the owner is {mine}, this is uid {me}")
    assert ("sudo chown -R 1234:1234 " if as_root else f"chmod u+rwx {both}") in found
    line(output, "wrong", f"{experiment.folder}/mlflow.db cannot be written as uid {me}")


def test_a_repository_that_git_does_not_trust_is_trusted_after_the_fix() -> None:
    # Not below pytest's folder, which another user cannot enter.
    with tempfile.TemporaryDirectory() as name, listening("0.0.0.0") as taken:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        (folder / "home").mkdir()
        subprocess.run(["git", "init", "--quiet", name], check=True)
        as_root = os.geteuid() == 0
        variables = {"HOME": f"{folder}/home", "GIT_CONFIG_NOSYSTEM": "1"}
        if not as_root:
            # Only root can give a folder away; this makes git take our own for another's.
            variables["GIT_TEST_ASSUME_DIFFERENT_OWNER"] = "1"
        experiment = Experiment(folder).set()
        # The taken port keeps the doctor's exit code at 4 after the fix too.
        words, stranger = ("--port", str(taken)), STRANGER if as_root else []
        fix = line(ask(experiment, *words, before=stranger, **variables), "wrong", f"git does not trust {folder},").partition(": ")[2]
        subprocess.run(fix, shell=True, check=True, env=os.environ | variables)
        assert f"git does not trust {folder}," not in ask(experiment, *words, before=stranger, **variables)


@pytest.mark.docker
def test_a_container_without_room_is_wrong_and_one_with_room_is_not(experiment: Experiment, image: str) -> None:
    def inside(*words: str, program: tuple[str, ...] = ("doctor", "--params", "/e/params.yaml"), expect: int = 0) -> str:
        command = ["docker", "run", "--rm", f"--volume={experiment.folder}:/e", *words, image, *program]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout

    inside("--user=0", program=("sh", "-c", "mkdir /e/models /e/runs && chmod 755 /e && chown -R 1000:1000 /e && touch /e/models/old"))
    try:
        output = inside("--memory=1g", "--tmpfs=/e/runs:size=100m,mode=755,uid=0", expect=4)
        assert "docker run --shm-size=1g" in line(output, "wrong", "/dev/shm has 64 MiB")
        assert "--memory=4g" in line(output, "note", "1024 MiB of memory to 2 ranks")
        line(output, "wrong", "0.1 GiB free for /e/runs, and a training needs 2.0")
        assert "on the host" in line(output, "wrong", "the owner is 0:0, this is uid 1000")
        assert "sudo chown -R 1000:1000 ." in line(output, "note", "to root, in a folder of uid 1000")
        output = inside("--user=1234:1234", "--shm-size=1g", expect=4)
        assert "env UID=1000 GID=1000 docker compose up" in line(
            output, "wrong", "/e /e/runs /e/models cannot be written: the owner is 1000:1000"
        )
        read_only = f"-v={experiment.folder}:/closed:ro"
        output = inside(read_only, program=("doctor", "--params", "/closed/params.yaml"), expect=4)
        assert "without :ro" in line(output, "wrong", "/closed /closed/runs /closed/models cannot be written: it is mounted read-only")
        output = inside("--shm-size=1g")
        line(output, "ok", "/dev/shm has 1024 MiB")
        line(output, "note", "/e/models/old belongs to root, in a folder of uid 1000")
    finally:
        inside("--user=0", program=("chown", "-R", f"{os.getuid()}:{os.getgid()}", "/e"))
