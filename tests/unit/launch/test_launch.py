"""Locks, engines and addresses: decided from what is asked for and what is here."""

import fcntl
import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from pipeline import ranks
from pipeline.config import Config, ConfigError, MachineError
from pipeline.hardware import network
from pipeline.plan import resolve_num_nodes
from pipeline.runs.lock import run_lock
from tests.kit.experiment import Experiment, settings


def config(**changes) -> Config:
    return Config.model_validate(settings(**({"train__precision": "auto"} | changes)))


def test_a_lock_that_a_living_process_holds_is_refused_at_once(tmp_path: Path) -> None:
    with run_lock(tmp_path / "lock"):
        started_at = time.monotonic()
        with pytest.raises(MachineError, match=rf"running already, on .* as process {os.getpid()} since"), run_lock(tmp_path / "lock"):
            pass
        assert time.monotonic() - started_at < 1


def test_a_lock_whose_launcher_is_dead_is_waited_for(tmp_path: Path) -> None:
    """As after a kill -9: the descriptor is still held by what the launcher started."""
    path = tmp_path / "lock"
    path.write_text(json.dumps({"host": os.uname().nodename, "pid": 4194304, "since": "then"}))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = subprocess.Popen(["sleep", "1.5"], pass_fds=(file.fileno(),))
    started_at = time.monotonic()
    with run_lock(path):
        assert time.monotonic() - started_at > 1
    process.wait()


def test_several_machines_without_a_leader_are_refused_with_the_two_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"pipeline lead dvc repro.*pipeline join HOST.*nodes: 1"):
        resolve_num_nodes(config(dist__nodes=2))
    monkeypatch.setenv("LOCKSTEP_STORE", "127.0.0.1:1")
    monkeypatch.setenv("LOCKSTEP_NODES", "2")
    assert resolve_num_nodes(config()).dist.nodes == 2
    monkeypatch.setenv("LOCKSTEP_NODES", "3")
    with pytest.raises(ConfigError, match=r"2 ranks cannot be spread evenly over 3 machines"):
        resolve_num_nodes(config())


def test_an_address_is_a_host_with_the_usual_port_or_its_own() -> None:
    assert network.split("leader") == ("leader", 29400)
    assert network.split("leader:1234") == ("leader", 1234)
    assert network.split("[::1]:1234") == ("::1", 1234)
    for wrong in ("leader:", ":29400", "leader:port"):
        with pytest.raises(ConfigError, match="write HOST:PORT"):
            network.split(wrong)


@pytest.mark.fault(19, "the port of lead is taken")
def test_a_taken_port_is_named_with_another(experiment: Experiment) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"port {port}: .*--port"):
            network.listen(port)
        said = experiment.run("lead", "--port", str(port), "true", expect=4)
    assert f"port {port}" in said


def test_a_command_that_is_not_there_is_refused(experiment: Experiment) -> None:
    assert "no program 'dvcc'" in experiment.run("lead", "dvcc", "repro", expect=2)
    assert "no command" in experiment.run("lead", expect=2)


def test_the_interface_towards_a_host_is_known() -> None:
    assert network.own_address("127.0.0.1", 1) == "127.0.0.1"
    assert network.interface("127.0.0.1") == "lo"
    assert network.interface("203.0.113.77") is None


def test_a_group_that_is_not_whole_does_not_begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MachineError, match=r"1 of 2 ranks together.*clocks"):
        ranks.rendezvous(2, 5)
