"""What the process group does beside the gradients."""

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline import ranks
from pipeline.config import MachineError
from pipeline.hardware.network import interface
from pipeline.heartbeat import COMPUTING, FORM, WAITING, Heartbeat
from pipeline.ranks import Ranks


def shown(heartbeat: Heartbeat) -> tuple[int, int]:
    """Phase and number of beats."""
    _, _, _, phase, beats, _ = FORM.unpack(heartbeat._shown[: FORM.size])
    return phase, beats


@pytest.mark.fault(38, "rank 0 writes for longer than a rank may stand still")
def test_while_rank_zero_works_ranks_of_other_machines_beat_and_those_beside_it_do_not(thread_ranks: Callable[..., list[Any]]) -> None:
    def work(group: Ranks) -> tuple[list[float], float, tuple[int, int]]:
        group = replace(group, beside_rank_zero=group.rank < 2, heartbeat=Heartbeat(None))
        done: list[float] = []

        def write() -> None:
            time.sleep(2.5)
            done.append(time.monotonic())

        group.while_others_wait(write)
        return done, time.monotonic(), shown(group.heartbeat)

    (done, _, first), (nothing, beside_at, beside), (_, other_at, other) = thread_ranks(3, work)
    assert (len(done), nothing) == (1, [])
    assert min(beside_at, other_at) >= done[0], "all wait for it"
    # One by hand, one a second from a thread.
    assert (first[0], other[0], first[1] >= 4, other[1] >= 4) == (WAITING, COMPUTING, True, True)
    assert beside == (WAITING, 1)


def test_rank_zero_that_nobody_meets_after_its_work_shows_that_it_waits(thread_ranks: Callable[..., list[Any]]) -> None:
    def work(group: Ranks) -> tuple[int, int]:
        group = replace(group, beside_rank_zero=True, heartbeat=Heartbeat(None))
        if group.rank == 1:
            time.sleep(2.5)
        group.while_others_wait(lambda: None)
        return shown(group.heartbeat)

    assert thread_ranks(2, work)[0] == (WAITING, 2)


def test_a_plain_torchrun_on_several_machines_does_not_wait_for_ranks_that_it_cannot_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    for name, value in (values | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "Heartbeat", lambda folder: Heartbeat(None))
    with pytest.raises(MachineError, match="on one machine only; on several use lead and join"):
        ranks.rendezvous(2, 60)


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "2", "GROUP_WORLD_SIZE": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "CONNECT_SECONDS", 1)


@pytest.mark.usefixtures("attempt")
def test_an_address_that_cannot_be_used_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(MachineError, match=rf"^dist\.init_method: {taken}: .*address already in use; name a free port of the leader"):
            ranks.open_store(taken, False, True, timedelta(seconds=60))
    with pytest.raises(MachineError, match=rf"^dist\.init_method: {taken}: .*timed out after 1000ms.*; name a free port of the leader"):
        ranks.open_store(taken, True, False, timedelta(seconds=60))
    (tmp_path / "params.yaml").write_text("seed: 1")
    for place in (tmp_path / "none" / "meeting", tmp_path, tmp_path / "params.yaml", Path("/sys/nofile")):
        with pytest.raises(MachineError, match=rf"^dist\.init_method: {place} can be no file of ranks here; name a new one in a folder"):
            ranks.open_store(f"file://{place}", True, True, timedelta(seconds=60))
    assert (tmp_path / "params.yaml").read_text() == "seed: 1"


@pytest.mark.usefixtures("attempt")
def test_an_ipv6_address_is_written_with_brackets() -> None:
    # A machine may have none.
    family, host = (socket.AF_INET6, "::1") if interface("::1") else (socket.AF_INET, "127.0.0.1")
    with socket.create_server((host, 0), family=family) as free:
        port = free.getsockname()[1]
    ranks.open_store(f"tcp://[{host}]:{port}", False, True, timedelta(seconds=5)).set("first", "0")


@pytest.mark.usefixtures("attempt")
def test_an_attempt_finds_no_key_of_another_one_in_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (("TORCHELASTIC_RESTART_COUNT", "3"), ("MASTER_PORT", "4")):
        ranks.open_store(f"file://{tmp_path}/meeting", False, True, timedelta(seconds=1)).set("first", "0")
        monkeypatch.setenv(variable, value)
        assert not ranks.open_store(f"file://{tmp_path}/meeting", False, True, timedelta(seconds=1)).check(["first"])
    # Agents of several machines count attempts each for itself.
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    ranks.open_store(f"file://{tmp_path}/meeting", False, True, timedelta(seconds=1)).set("first", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "5")
    assert ranks.open_store(f"file://{tmp_path}/meeting", False, False, timedelta(seconds=1)).check(["first"])
