"""Leader and workers without containers: several shells on one machine, each with files of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.kit.compose import free_port
from tests.kit.experiment import ROOT
from tests.kit.leading import LONG, Job, digest, end, experiment_in, ranks_below


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the long experiment on one machine, left alone."""
    alone = experiment_in(tmp_path_factory.mktemp("alone") / "one", **LONG)
    alone.run("prepare")
    alone.run("train")
    return digest(alone)


@pytest.mark.slow
def test_two_machines_with_files_of_their_own_end_in_the_bits_of_one(tmp_path: Path, reference: str) -> None:
    job = Job(tmp_path, **LONG)
    worker, leader = job.join(), job.lead()
    code, said = end(leader)
    assert code == 0, said
    code, said = end(worker, 15)
    assert code == 0, said
    assert "preparing synthetic:3000" in said
    receipt = job.leading.json("models/receipt.json")
    assert receipt["weights_sha256"] == reference
    assert receipt["placement"]["nodes"] == 2
    assert not list((tmp_path / "worker-1").glob("runs/*/journal.jsonl"))
    assert list((tmp_path / "worker-1").glob("runs/*/logs/*/torchrun.log"))


@pytest.mark.slow
def test_a_spare_worker_takes_the_place_of_a_killed_one_and_no_bit_changes(tmp_path: Path, reference: str) -> None:
    placed = {"dist__world_size": 3, "dist__batch_size_per_gpu": 64, "dist__lanes_per_rank": [1, 2, 1]}
    job = Job(tmp_path, workers=2, **LONG | placed | {"dist__init_method": f"tcp://127.0.0.1:{free_port()}"})
    workers, leader = [job.join(), job.join(), job.join()], job.lead()
    job.wait_for_steps(20)
    # All start again, and the spare does not take the leader's place.
    (rank,) = ranks_below(leader)
    rank.kill()
    job.wait_for_steps(40)
    assert [len(ranks_below(one)) for one in workers].count(1) == 2
    working = next(one for one in workers if ranks_below(one))
    for process in [*psutil.Process(working.pid).children(recursive=True), working]:
        process.kill()
    code, said = end(leader)
    assert code == 0, said
    assert "lost its connection" in said
    assert digest(job.leading) == reference
    assert sorted(end(one, 15)[0] for one in workers) == [-signal.SIGKILL, 0, 0]


@pytest.mark.slow
def test_a_killed_rank_of_a_worker_is_named_and_its_job_starts_again(tmp_path: Path, reference: str) -> None:
    placed = {"dist__world_size": 4, "dist__batch_size_per_gpu": 48, "dist__init_method": f"file://{tmp_path}/meeting"}
    job = Job(tmp_path, **LONG | placed)
    worker, leader = job.join(), job.lead()
    job.wait_for_steps(30)
    _, second = ranks_below(worker)
    second.kill()
    code, said = end(leader)
    assert code == 0, said
    assert re.search(rf"rank [23] on {socket.gethostname()} was ended by SIGKILL", said), said
    assert digest(job.leading) == reference
    # Two machines of two ranks sum their gradients level by level.
    logs = [path.read_bytes() for path in (tmp_path / "leader").glob("runs/*/logs/**/*") if path.is_file()]
    assert sum(b"gradients are summed in levels of [2, 2] ranks" in text for text in logs) >= 2
    assert end(worker, 15)[0] == 0


@pytest.mark.slow
@pytest.mark.fault(38, "a checkpoint that takes 9 s to write, with a timeout of 5 s, on two machines")
def test_a_worker_waits_for_a_checkpoint_that_takes_longer_than_a_rank_may_stand_still(tmp_path: Path) -> None:
    job = Job(tmp_path, dist__timeout_seconds=10, checkpoint__every_steps=11, train__epochs=1)
    train = (sys.executable, "-m", "tests.kit.faulty", "train", "--params", str(job.leading.params))
    worker, leader = job.join(), job.lead(*train, FAULT="disk:0:0")
    code, said = end(leader)
    assert code == 0, said
    assert "starting again" not in said
    assert end(worker, 15)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["leader", "worker"])
def test_a_signal_to_either_stops_both_and_the_job_goes_on_from_there(tmp_path: Path, reference: str, asked: str) -> None:
    job = Job(tmp_path, **LONG)
    worker, leader = job.join(), job.lead()
    job.wait_for_steps(30)
    (leader if asked == "leader" else worker).send_signal(signal.SIGTERM)
    code, said = end(leader, 60)
    assert code == 75, said
    assert "stopped on request" in said
    assert end(worker, 15)[0] == 75
    assert json.loads((job.leading.run_folder / "status.json").read_text())["exit_code"] == 75
    worker, leader = job.join(), job.lead()
    code, said = end(leader)
    assert code == 0, said
    assert "going on from" in said
    assert end(worker, 15)[0] == 0
    assert digest(job.leading) == reference


@pytest.mark.slow
def test_after_a_killed_training_the_next_one_of_the_same_leader_has_its_workers(tmp_path: Path) -> None:
    job = Job(tmp_path)
    train = f"{sys.executable} -m pipeline train --params {job.leading.params}"
    worker, leader = job.join(), job.lead("sh", "-c", f"{train}; {train}")
    job.wait_for_steps(2)
    (first,) = [one for one in psutil.Process(leader.pid).children() if "train" in one.cmdline()] or [
        below for one in psutil.Process(leader.pid).children() for below in one.children()
    ]
    first.kill()
    code, said = end(leader, 120)
    assert code == 0, said
    assert end(worker, 15)[0] == 0
    assert [one["outcome"] for one in job.leading.journal("ended")][-1] == "done"


@pytest.mark.slow
@pytest.mark.fault(2, "SIGKILL of a leader without containers")
def test_workers_leave_when_their_leader_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path, **LONG)
    worker, leader = job.join(), job.lead()
    job.wait_for_steps(20)
    for process in [*psutil.Process(leader.pid).children(recursive=True), leader]:
        process.kill()
    code, said = end(worker, 20)
    assert code == 6
    assert "the leader is gone" in said
    leader.communicate()


@pytest.mark.slow
@pytest.mark.fault(26, "the leader's name resolves no more, and then a rank is killed")
def test_a_name_that_stops_resolving_is_not_needed_any_more(tmp_path: Path, reference: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a process names of its own")
    job, hosts = Job(tmp_path, **LONG), tmp_path / "hosts"
    # Whichever agent comes first looks for a free port at localhost.
    hosts.write_text("127.0.0.1 localhost\n127.0.0.1 leader.of.this.job\n")
    own = experiment_in(tmp_path / "worker", **LONG)
    join = f"mount --bind {hosts} /etc/hosts && exec {sys.executable} -m pipeline join leader.of.this.job:{job.port} --params {own.params}"
    worker = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", join], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    leader = job.lead()
    job.wait_for_steps(20)
    hosts.write_text("127.0.0.1 localhost\n")
    (rank,) = ranks_below(worker)
    rank.kill()
    code, said = end(leader)
    assert code == 0, said
    assert "starting again" in said
    assert digest(job.leading) == reference
    assert end(worker, 15)[0] == 0


@pytest.mark.slow
def test_a_worker_that_would_compute_other_bits_is_refused_by_name(tmp_path: Path) -> None:
    job = Job(tmp_path)
    worker, leader = job.join(ONEDNN_MAX_CPU_ISA="AVX2"), job.lead()
    code, said = end(leader, 60)
    assert code == 4, said
    assert f"worker {socket.gethostname()}: would compute other bits: device" in said
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in said
    assert end(worker, 15)[0] == 4


@pytest.mark.slow
def test_workers_leave_with_the_verdict_also_when_there_was_nothing_to_train(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for code in (0, 3):
        started_at = time.monotonic()
        leader, worker = job.lead("sh", "-c", f"exit {code}"), job.join()
        assert end(leader, 30)[0] == code
        assert end(worker, 30)[0] == code
        assert time.monotonic() - started_at < 40


@pytest.mark.slow
def test_what_an_engine_says_in_pet_variables_makes_leader_and_worker_of_one_command(tmp_path: Path) -> None:
    job = Job(tmp_path)
    pet = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(job.port)}
    other = experiment_in(tmp_path / "other")
    train = (sys.executable, "-m", "pipeline", "train", "--params", str(job.leading.params))
    second = other.start("lead", *train, **pet, PET_NODE_RANK="1")
    first = job.leading.start("lead", *train, **pet, PET_NODE_RANK="0")
    code, said = end(first, 60)
    assert code == 0, said
    assert end(second, 15)[0] == 0
    assert job.leading.json("models/receipt.json")["placement"]["nodes"] == 2
