"""A network that drops, loses and delays without a word: between leader and worker, between their ranks, and to MLflow."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from pipeline.runs.checkpoints import sha256_of_file as digest_of
from tests.kit.compose import free_port
from tests.kit.experiment import ROOT, Experiment, clean_environment
from tests.kit.leading import LONG, digest, end, experiment_in
from tests.kit.networks import Link
from tests.kit.servers import Server
from tests.kit.waiting import until

Note = Callable[[str, object], None]
# 45 MB of weights, and no momentum, which would be as much again in a checkpoint.
RESNET = {"model__name": "resnet18", "data": {"name": "synthetic:720", "image_size": 12}, "train__epochs": 3, "checkpoint__keep": 1}
RESNET |= {"train__momentum": 0.0}
# With it a step takes a while, and yet nothing is sent twice.
SHORT_DELAY_SECONDS = 0.05
# Ranks that stand still are noticed in seconds.
WATCHED = LONG | {"dist__timeout_seconds": 20, "train__epochs": 20}


def start(link: Link, side: str, experiment: Experiment, *words: str, **environment: str) -> subprocess.Popen[str]:
    command = [*link.within(side), sys.executable, "-m", "pipeline", words[0], "--params", str(experiment.params), *words[1:]]
    environment = clean_environment() | environment
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def models_in(client: MlflowClient, run: Run) -> dict[str, str]:
    return {one.name: str(one.status) for one in client.search_logged_models([run.info.experiment_id])}


def not_ready(client: MlflowClient, run: Run) -> set[str]:
    return set(models_in(client, run).values()) - {"READY"}


class Pair:
    """A leader and a worker with a link between them."""

    def __init__(self, link: Link, folder: Path, **changes):
        self.link, self.port, self._folder = link, free_port(), folder
        self.leading, self._changes, self._joined = experiment_in(folder / "leader", **changes), changes, 0
        self.leading.run("prepare")
        train = (sys.executable, "-m", "pipeline", "train", "--params", str(self.leading.params))
        self.leader = start(link, "a", self.leading, "lead", "--workers", "1", "--port", str(self.port), *train)
        self.worker = self.join()

    def join(self) -> subprocess.Popen[str]:
        self._joined += 1
        own = experiment_in(self._folder / f"worker-{self._joined}", **self._changes)
        return start(self.link, "b", own, "join", f"{self.link.addresses['a']}:{self.port}")

    def lines(self) -> int:
        return sum(path.read_text().count("train/loss") for path in (self.leading.folder / "runs").glob("*/journal.jsonl"))

    def wait_for_steps(self, count: int, seconds: float = 120) -> None:
        wanted = self.lines() + count
        until(lambda: self.lines() >= wanted, self.leader, seconds)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the experiment on one machine, left alone."""
    alone = experiment_in(tmp_path_factory.mktemp("alone") / "one", **WATCHED)
    alone.run("prepare")
    alone.run("train")
    return digest(alone)


@pytest.mark.slow
@pytest.mark.fault(34, "a fifth lost for 10 s, all lost for 5 s, a second's delay for 10 s, between leader, worker and their ranks")
def test_a_network_that_comes_back_costs_nothing_but_time(tmp_path: Path, reference: str) -> None:
    with Link() as link:
        pair = Pair(link, tmp_path, **WATCHED)
        pair.wait_for_steps(10)
        link.loss = 0.2
        time.sleep(10)
        # TCP may wait for 6.4 s before it sends again what was lost: were that lost too, a heartbeat would be 15 s late.
        link.loss, link.delay_seconds = 0.0, SHORT_DELAY_SECONDS
        time.sleep(7)
        link.drops = True
        time.sleep(1)
        before = pair.lines()
        time.sleep(4)
        assert pair.lines() == before, "it went on without a network"
        link.drops = False
        pair.wait_for_steps(5, 30)
        link.delay_seconds = 1.0
        time.sleep(10)
        assert not pair.leading.journal("finished"), "it was over too early"
        link.delay_seconds = 0.0
        code, said = end(pair.leader)
        assert code == 0, said
        assert "starting again" not in said, said
        assert end(pair.worker, 15)[0] == 0
        assert link.dropped > 50
    assert digest(pair.leading) == reference


@pytest.mark.slow
@pytest.mark.fault(34, "all lost for good, between leader and worker: both notice, and another worker takes the place")
def test_a_network_that_stays_away_is_noticed_on_both_sides_and_another_worker_takes_over(tmp_path: Path, reference: str) -> None:
    with Link() as link:
        pair = Pair(link, tmp_path, **WATCHED)
        pair.wait_for_steps(10)
        link.drops = True
        dropped_at = time.monotonic()
        code, said = end(pair.worker, 100)
        assert code == 6, said
        assert f"{link.addresses['a']}:{pair.port}: the leader is gone" in said
        assert time.monotonic() - dropped_at < 60
        link.drops = False
        other = pair.join()
        code, said = end(pair.leader)
        assert code == 0, said
        assert "starting again" in said
        assert end(other, 15)[0] == 0
    assert digest(pair.leading) == reference


@pytest.mark.slow
@pytest.mark.fault(34, "all lost between the ranks and MLflow, from the middle on")
def test_a_network_to_mlflow_that_stays_away_costs_a_warning(tmp_path: Path) -> None:
    with Link(a_is_here=True) as link:
        server = Server(tmp_path / "server", host=link.addresses["a"]).start()
        experiment = experiment_in(tmp_path / "one", **LONG)
        experiment.run("prepare")
        process = start(link, "b", experiment, "train", MLFLOW_TRACKING_URI=server.uri)
        until(lambda: [path for path in experiment.folder.glob("runs/*/mirror.json") if "run_id" in path.read_text()], process)
        until(lambda: experiment.journal("metrics")[20:], process)
        link.drops = True
        until(lambda: experiment.journal("finished"), process)
        finished_at = time.monotonic()
        code, said = end(process)
        assert code == 0, said
        assert time.monotonic() - finished_at < 40
        assert said.count("MLflow does not have all of it yet") == 1
        assert "python -m pipeline sync" in said
        link.drops = False
        synced = start(link, "b", experiment, "sync", MLFLOW_TRACKING_URI=server.uri)
        code, said = end(synced)
        assert code == 0, said
        server.kill()


@pytest.mark.slow
@pytest.mark.fault(34, "10 Mbit/s between the ranks and MLflow, and ResNet-18's files to send")
def test_a_slow_link_to_mlflow_gets_every_file_and_the_training_waits_for_none(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with Link(a_is_here=True) as link:
        server = Server(tmp_path / "server", host=link.addresses["a"]).start()
        link.limit("10mbit")
        experiment = experiment_in(tmp_path / "one", **RESNET)
        experiment.run("prepare")
        process = start(link, "b", experiment, "train", MLFLOW_TRACKING_URI=server.uri)
        client = MlflowClient(server.uri)
        until(lambda: list(experiment.folder.glob("runs/*/journal.jsonl")), process)
        until(lambda: experiment.journal("finished"), process, 240)
        # No step waits for the mirror: on a busy machine it may have just begun.
        (run,) = until(lambda: client.search_runs([one.experiment_id for one in client.search_experiments()]), process, every_seconds=1)
        behind = max(line["values"].get("train/samples", 0) for line in experiment.journal("metrics"))
        # Figures overtake files: one is on its way, and still is when the last loss is there.
        assert until(lambda: not_ready(client, run), process, 60, 0.2) == {"PENDING"}
        until(lambda: client.get_run(run.info.run_id).data.metrics.get("train/samples") == behind, process, 20, 0.2)
        assert not_ready(client, run) == {"PENDING"}
        finished_at = time.monotonic()
        code, said = end(process, 420)
        late = time.monotonic() - finished_at
        assert code == 0, said
        assert "MLflow does not have all of it yet" not in said
        assert client.get_run(run.info.run_id).info.status == "FINISHED"
        kept = sorted(experiment.run_folder.glob("checkpoints/*.safetensors"))
        assert models_in(client, run) == dict.fromkeys(["model", *(path.stem for path in kept)], "READY")
        sent = {digest_of(path) for path in (tmp_path / "server" / "artifacts").rglob("*") if path.is_file()}
        assert {digest_of(path) for path in (*kept, experiment.run_folder / "model.pt2")} <= sent
        server.kill()
    megabytes = sum(path.stat().st_size for path in (*kept, experiment.run_folder / "model.pt2")) / 1e6
    record_property("happened", f"{megabytes:.0f} MB whole, {late:.0f} s after the last step; figures within seconds")
