"""Who may take part in a job: a worker with GPUs of its own; and who is waited for at its end."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore

from pipeline.cluster.leader import lead_job
from pipeline.cluster.membership import MultiNode
from pipeline.cluster.messages import Reply
from pipeline.cluster.store import ClusterStore
from pipeline.launch.node import Node
from pipeline.lead import SignalRelay, wait_for_goodbyes
from pipeline.process_tree import STOP_FILE, STORE
from pipeline.runs.status import StopRequested
from tests.kit.driver import driver
from tests.kit.experiment import ROOT, make_job
from tests.kit.machines import offer_of


def test_of_workers_that_share_a_gpu_one_takes_part_and_the_other_says_why_not() -> None:
    store, said = ClusterStore(HashStore(), "leader"), list[str]()
    offer = offer_of(3).model_copy(update={"id": "job", "gpus": ["first"]})
    members = MultiNode(Node(1, 1, 3, job_id="job"), offer, store, said.append)

    def come(worker: str, *gpus: str) -> None:
        store.append("job/replies", Reply(worker=worker, host=f"host-{worker}", leader="", refusal=None, gpus=list(gpus)).model_dump())
        store.put(f"heartbeats/{worker}", time.time())

    def admitted() -> list[str]:
        members._review()
        return store.get("job/members")

    for worker, gpus in (("a", ["first"]), ("b", ["second"]), ("c", ["second", "third"]), ("d", [])):
        come(worker, *gpus)
    # A worker on CPUs has none that could be another's.
    assert admitted() == admitted() == ["b", "d"]
    left_out = "is left out, as it has a GPU of {}; give each its own, such as by WORKER_GPUS"
    assert said == [f"worker host-a {left_out.format('the leader')}", f"worker host-c {left_out.format('host-b')}"]
    store.append("job/leaving", "b")
    assert admitted() == ["d", "c"]
    come("e", "third")
    store.append("job/leaving", "d")
    assert admitted() == ["c"]
    assert said[2:] == [f"worker host-e {left_out.format('host-c')}"]


@pytest.mark.parametrize(("backend", "ranks", "uuids"), [("nccl", 1, 1), ("nccl", 2, 2), ("gloo", 2, 0)])
def test_only_the_gpus_that_ranks_of_nccl_compute_on_are_their_own(backend: str, ranks: int, uuids: int, tmp_path: Path) -> None:
    program = f"from pipeline.cluster.readiness import gpus_of_ranks; print(*gpus_of_ranks({backend!r}, {ranks}))"
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | driver(tmp_path), capture_output=True, text=True)
    assert said.stdout.split() == ["11" * 16, "12" * 16][:uuids], said.stderr


class Seconds:
    """A clock of no real time: `then` is done from 2 s on."""

    def __init__(self, then: Callable[[], None]):
        self.now, self._then = 0.0, then

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= 2:
            self._then()


@pytest.mark.parametrize(("comes", "seconds"), [(True, 2), (False, 5)])
def test_a_worker_that_starts_as_all_are_stopped_still_reads_how_it_ended(comes: bool, seconds: float) -> None:
    store, relay = ClusterStore(HashStore(), "leader"), SignalRelay(Path("nowhere/stop-requested"))
    relay._requested_at = 0.0

    def come() -> None:
        for name in ("workers", "goodbyes"):
            if not store.since(name, 0):
                store.append(name, "late")

    clock = Seconds(come if comes else lambda: None)
    wait_for_goodbyes(store, 1, 0.0, relay, clock)
    assert seconds <= clock.now < seconds + 1


def test_a_stop_request_that_came_before_its_wait_for_workers_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE, "127.0.0.1:1")
    monkeypatch.setattr("pipeline.cluster.leader._offer", lambda *_: None)
    job, stop_file = make_job(tmp_path, dist__nodes=2), tmp_path / "stop"
    # By a signal to this process, or by a file, at once or while the offer was made.
    for answers in ([True], [False, True]):
        with pytest.raises(StopRequested, match="stopped on request before it began"):
            lead_job("train", job, print, lambda left=answers: left.pop(0))
    monkeypatch.setenv(STOP_FILE, str(stop_file))
    with pytest.raises(StopRequested, match="stopped on request before it began"):
        lead_job("train", job, print, lambda: bool(stop_file.touch()))
