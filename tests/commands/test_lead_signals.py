"""Signals to leaders and workers, the leader's exit code, and who can reach its port."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.lead import SignalRelay
from pipeline.timeouts import STORM_SECONDS
from tests.kit.compose import free_port
from tests.kit.experiment import Experiment
from tests.kit.leading import LONG, Job, digest, end, runs_below
from tests.kit.waiting import until

# Writes down every signal that it gets, and stays.
RECORDER = """
import signal, sys, time
def note(number, _):
    print(signal.Signals(number).name, flush=True)
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(one, note)
print("ready", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until:
    time.sleep(0.1)
"""


def led(experiment: Experiment, *words: str) -> subprocess.Popen[str]:
    return experiment.start("lead", "--workers", "0", "--port", str(free_port()), *words)


def signal_all(process: subprocess.Popen[str], number: int) -> None:
    """To every process of a job, as systemd and some schedulers do."""
    for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        try:
            one.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def test_a_storm_of_signals_reaches_the_command_once_and_a_persons_second_as_it_is(experiment: Experiment) -> None:
    process = led(experiment, sys.executable, "-c", RECORDER)
    assert process.stdout is not None
    until(lambda: "ready" in process.stdout.readline(), seconds=30)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
        time.sleep(0.5)
    # A busy machine may have let `lead` wait: its storm begins when it sees the first signal, before it passes it on.
    first = process.stdout.readline().strip()
    time.sleep(STORM_SECONDS)
    process.send_signal(signal.SIGTERM)
    assert [first, process.stdout.readline().strip()] == ["SIGINT", "SIGTERM"]
    for one in psutil.Process(process.pid).children(recursive=True):
        one.kill()
    assert end(process, 30)[0] == 128 + signal.SIGKILL


def test_a_command_that_is_stopped_before_it_has_ranks_is_one_to_start_again(experiment: Experiment) -> None:
    # As DVC does with a stage that was stopped, and a shell that dies of the signal itself.
    as_dvc = "import time\ntry: print('ready', flush=True), time.sleep(60)\nexcept: exit(255)"
    for words in ((sys.executable, "-c", as_dvc), ("sh", "-c", "echo ready; sleep 60; true")):
        process = led(experiment, *words)
        assert process.stdout is not None
        until(lambda: "ready" in process.stdout.readline(), seconds=30)  # noqa: B023
        # dash blocks signals until it has forked: one that comes meanwhile ends it and never reaches what it forks.
        until(lambda: runs_below(process, words[0] if words[0] == sys.executable else "sleep"), seconds=30)  # noqa: B023
        process.send_signal(signal.SIGTERM)
        assert end(process, 30)[0] == 75


def test_after_a_stop_request_no_further_stage_begins(experiment: Experiment, tmp_path: Path) -> None:
    experiment.run("prepare")
    # As DVC ignores a signal while a stage runs that has nothing left to stop.
    train = f"trap '' INT; echo ready; sleep 2; {sys.executable} -m pipeline train --params {experiment.params} || exit 255"
    words = ("lead", "--workers", "0", "--port", str(free_port()), "sh", "-c", train)
    process = experiment.start(*words, LOCKSTEP_EXIT_FILE=str(tmp_path / "exit"))
    assert process.stdout is not None
    until(lambda: "ready" in process.stdout.readline(), seconds=30)
    process.send_signal(signal.SIGTERM)
    code, said = end(process, 60)
    assert (code, (tmp_path / "exit").read_text()) == (75, "75\n"), said
    assert "stopped on request before it began" in said
    # What a person types is what was typed, and not what stands below it.
    assert "No checkpoint was written yet. To start: python -m pipeline lead --" in said
    assert not list(experiment.folder.glob("runs/*/checkpoints/*"))


def test_a_signal_after_the_commands_end_reaches_no_process_that_has_its_number_by_then(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        relay = SignalRelay(tmp_path / "stop", other.pid)
        relay.command_ended = True
        relay.on_signal(signal.SIGTERM, None)
        assert relay.hurried
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        # The same signal would have ended it.
        SignalRelay(tmp_path / "stop", other.pid).on_signal(signal.SIGTERM, None)
        assert other.wait(5) == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.fault(29, "SIGTERM to lead, a shell, train, agent and ranks, three times within 3 s")
@pytest.mark.parametrize("first", ["lead", "train"])
def test_a_signal_to_every_process_of_a_leader_is_one_request(experiment: Experiment, first: str) -> None:
    experiment.set(**LONG | {"train__epochs": 30}).run("prepare")
    # The shell is ended by it, as DVC is.
    process = led(experiment, "sh", "-c", f"{sys.executable} -m pipeline train --params {experiment.params}; exit 255")
    until(lambda: list(experiment.folder.glob("runs/*/checkpoints/*.safetensors")), process)
    (train,) = [one for one in psutil.Process(process.pid).children(recursive=True) if "train" in one.cmdline()[:5]]
    (process if first == "lead" else train).send_signal(signal.SIGTERM)
    time.sleep(0.5)
    for _ in range(3):
        signal_all(process, signal.SIGTERM)
        time.sleep(0.6)
    code, said = end(process, 60)
    assert code == 75, said
    status = json.loads((experiment.run_folder / "status.json").read_text())
    assert (status["outcome"], status["exit_code"]) == ("stopped", 75)
    assert "nothing could be saved" not in said
    assert status["checkpoint"]


@pytest.mark.slow
def test_the_leaders_late_sigint_is_no_second_request(experiment: Experiment) -> None:
    experiment.set(**LONG | {"train__epochs": 30}).run("prepare")
    process = led(experiment, sys.executable, "-m", "pipeline", "train", "--params", str(experiment.params))
    until(lambda: list(experiment.folder.glob("runs/*/checkpoints/*.safetensors")), process)
    (train,) = psutil.Process(process.pid).children()
    ranks = [one for one in train.children(recursive=True) if "pipeline.training.train_rank" in one.cmdline()]
    # So that they are still there when the late one comes.
    for one in ranks:
        one.suspend()
    train.send_signal(signal.SIGTERM)
    time.sleep(STORM_SECONDS + 1)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert train.is_running()
    for one in ranks:
        one.resume()
    code, said = end(process, 60)
    assert code == 75, said
    assert "stopped on request" in said


@pytest.mark.slow
def test_a_leader_without_workers_exits_with_the_code_of_its_ranks(experiment: Experiment) -> None:
    experiment.set(train__learning_rate=1e30).run("prepare")
    # As DVC does.
    train = f"{sys.executable} -m pipeline train --params {experiment.params} || exit 255"
    code, said = end(led(experiment, "sh", "-c", train))
    assert code == 5, said


@pytest.mark.slow
def test_a_leader_that_waits_for_workers_is_stopped_with_75(tmp_path: Path) -> None:
    job = Job(tmp_path)
    leader = job.lead("sh", "-c", f"{sys.executable} -m pipeline train --params {job.leading.params} || exit 255")
    assert leader.stdout is not None
    until(lambda: "waiting for 1 of 1 workers" in leader.stdout.readline(), leader)
    leader.send_signal(signal.SIGTERM)
    leader.send_signal(signal.SIGTERM)
    # An engine kills what is still there after half a minute.
    code, said = end(leader, 25)
    assert code == 75, said
    assert "stopped on request while it waited for workers" in said
    (path,) = job.leading.folder.glob("runs/*/status.json")
    status = json.loads(path.read_text())
    assert (status["outcome"], status["exit_code"]) == ("stopped", 75)


@pytest.mark.slow
def test_a_worker_that_waits_is_stopped_with_75_and_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path)
    worker = job.join()
    assert worker.stdout is not None
    until(lambda: "waiting for it" in worker.stdout.readline(), worker)
    worker.send_signal(signal.SIGTERM)
    code, said = end(worker, 15)
    assert (code, said) == (75, f"stopped on request while it waited for the leader 127.0.0.1:{job.port}\n")
    leader, worker = job.lead("sleep", "30"), job.join()
    assert worker.stdout is not None
    until(lambda: "waiting for a job" in worker.stdout.readline(), worker)
    for _ in range(3):
        worker.send_signal(signal.SIGTERM)
    code, said = end(worker, 15)
    assert (code, said) == (75, "stopped on request while it waited for a job\n")
    leader.send_signal(signal.SIGTERM)
    # Nobody waits for a worker that has said goodbye.
    assert end(leader, 15)[0] == 75


@pytest.mark.slow
def test_a_spare_that_is_stopped_stops_nobody_else(tmp_path: Path) -> None:
    job = Job(tmp_path, **LONG)
    leader, workers = job.lead(), [job.join(), job.join()]
    job.wait_for_steps(10)
    (spare,) = [one for one in workers if len(psutil.Process(one.pid).children(recursive=True)) == 0]
    spare.send_signal(signal.SIGTERM)
    assert end(spare, 15)[0] == 75
    code, said = end(leader)
    assert code == 0, said
    assert sorted(end(one, 15)[0] for one in workers if one is not spare) == [0]
    assert digest(job.leading)


def listening(process: subprocess.Popen[str]) -> set[str]:
    here = psutil.Process(process.pid).net_connections("tcp")
    return {one.laddr.ip for one in here if one.status == psutil.CONN_LISTEN}


def test_the_port_is_open_to_whom_it_may_concern(experiment: Experiment) -> None:
    def listens(*options: str) -> set[str]:
        process = experiment.start("lead", *options, "--port", str(free_port()), "sleep", "20")
        addresses = until(lambda: listening(process), process)
        process.kill()
        process.communicate()
        return addresses

    assert listens("--workers", "0") == {"127.0.0.1"}
    assert listens("--workers", "1") <= {"::", "0.0.0.0"}
    assert listens("--workers", "1", "--bind", "127.0.0.2") == {"127.0.0.2"}
    assert "--bind 203.0.113.7: no interface of this machine has this address" in experiment.run(
        "lead", "--bind", "203.0.113.7", "true", expect=4
    )
    assert "--bind here: is no address" in experiment.run("lead", "--bind", "here", "true", expect=2)


@pytest.mark.slow
def test_a_leader_and_a_worker_meet_on_the_address_that_it_is_bound_to(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as probe:
        port = probe.getsockname()[1]
    job = Job(tmp_path)
    train = (sys.executable, "-m", "pipeline", "train", "--params", str(job.leading.params))
    leader = job.leading.start("lead", "--workers", "1", "--bind", "127.0.0.2", "--port", str(port), *train)
    worker = Experiment(tmp_path).set().start("join", f"127.0.0.2:{port}")
    code, said = end(leader)
    assert code == 0, said
    assert end(worker, 15)[0] == 0
