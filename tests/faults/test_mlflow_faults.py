"""MLflow dead, deaf, slow, refusing, lying or full: training does not care, and after `sync` nothing is missing."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest

from pipeline.tracking.journal import last
from tests.faults.test_disk_faults import fill, small_disk
from tests.faults.test_rank_faults import status
from tests.kit.experiment import LONGER, Experiment
from tests.kit.servers import Proxy, Server
from tests.kit.trainings import experiment_steps, mlflow_runs, ranks_of, same_figures, wait_for_step

__all__ = ["small_disk"]
pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = Server(tmp_path_factory.mktemp("server")).start()
    yield one
    one.kill()


def in_mlflow(uri: str, tag: str) -> dict[str, Any]:
    """All that MLflow holds of a run, apart from what depends on the clock or the machine."""
    client = mlflow.MlflowClient(uri)
    (run,) = [
        one
        for experiment in client.search_experiments()
        for one in client.search_runs([experiment.experiment_id])
        if one.data.tags.get("lockstep.run") == tag
    ]
    metrics = {
        name: sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
        if "per_second" not in name
    }

    def files(folder: str | None = None) -> list[str]:
        found = client.list_artifacts(run.info.run_id, folder)
        return sorted(name for one in found for name in (files(one.path) if one.is_dir else [one.path]))

    tags = {
        name: value for name, value in run.data.tags.items() if name in ("lockstep.outcome", "lockstep.weights_sha256", "lockstep.model")
    }
    return {"status": run.info.status, "params": run.data.params, "metrics": metrics, "tags": tags, "artifacts": files()}


def tag_of(experiment: Experiment) -> str:
    return last(experiment.run_folder / "journal.jsonl", "run")["id"]


def late_seconds(experiment: Experiment, process: subprocess.Popen[str]) -> tuple[str, float]:
    """What it said, and how long after the last word of its journal it ended."""
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    return said, time.time() - last(experiment.run_folder / "journal.jsonl", "ended")["at"] / 1000


def warned_once(said: str) -> None:
    assert said.count("MLflow does not have all of it yet") == 1, said
    assert "To catch up: python -m pipeline sync" in said


@pytest.mark.parametrize("when", ["start", "middle", "end"])
@pytest.mark.fault(16, "a real server: not there at the start; SIGKILLed in the middle; SIGKILLed at the end; started again, sync")
def test_a_server_that_is_down_costs_nothing_and_sync_makes_it_whole(
    baseline: Experiment, experiment: Experiment, when: str, tmp_path: Path, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    server = Server(tmp_path / "server")
    if when != "start":
        server.start()
    process = experiment.start("train", MLFLOW_TRACKING_URI=server.uri)
    if when != "start":
        wait_for_step(experiment, 60 if when == "middle" else experiment_steps(baseline), process)
        server.kill()
    said, late = late_seconds(experiment, process)
    warned_once(said)
    assert late < 10
    if when == "start":
        refused = experiment.run("sync", expect=4, MLFLOW_TRACKING_URI=server.uri)
        assert "does not answer: connection refused" in said
        assert "does not answer: connection refused" in refused
    server.start()
    try:
        assert "MLflow has all of it" in experiment.run("sync", MLFLOW_TRACKING_URI=server.uri)
        held = in_mlflow(server.uri, tag_of(experiment))
    finally:
        server.kill()
    assert held == in_mlflow(f"sqlite:///{baseline.folder / 'mlflow.db'}", tag_of(baseline))
    same_figures(experiment, baseline)
    record_property("happened", f"down at the {when}: exit 0, {late:.1f} s late, one warning; after sync the same as baseline, FINISHED")


@pytest.mark.parametrize("mode", ["hole", "slow", "500", "liar"])
@pytest.mark.fault(17, "behind a proxy the server is black-holed, slow (3 s a call), answers 500, or says yes and keeps nothing")
def test_a_bad_server_makes_the_exit_late_by_ten_seconds_at_most(
    baseline: Experiment, experiment: Experiment, server: Server, mode: str, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    proxy = Proxy(server.uri)
    proxy.mode = "slow" if mode == "slow" else "pass"
    process = experiment.start("train", MLFLOW_TRACKING_URI=proxy.uri)
    wait_for_step(experiment, 60, process)
    proxy.mode = mode
    said, late = late_seconds(experiment, process)
    warned_once(said)
    assert late < 10
    proxy.mode = "pass"
    assert "MLflow has all of it" in experiment.run("sync", MLFLOW_TRACKING_URI=proxy.uri)
    proxy.close()
    assert in_mlflow(server.uri, tag_of(experiment)) == in_mlflow(f"sqlite:///{baseline.folder / 'mlflow.db'}", tag_of(baseline))
    same_figures(experiment, baseline)
    record_property("happened", f"{mode}: exit 0, {late:.1f} s late, one warning; after sync the same as baseline")


@pytest.mark.fault(17, "a real server that refuses this name with 403")
def test_a_403_is_explained(experiment: Experiment, tmp_path: Path, record_property: Note) -> None:
    experiment.set(model__name="mlp").run("prepare")
    server = Server(tmp_path / "server", MLFLOW_SERVER_ALLOWED_HOSTS="tracking.example").start(answers=403)
    try:
        said, late = late_seconds(experiment, experiment.start("train", MLFLOW_TRACKING_URI=server.uri))
    finally:
        server.kill()
    warned_once(said)
    assert late < 10
    assert "MLFLOW_SERVER_ALLOWED_HOSTS" in said
    record_property("happened", f"exit 0, {late:.1f} s late; the variable that lets the name in is named")


@pytest.mark.fault(17, "MLflow's own disk is full")
def test_a_full_disk_of_mlflows_is_waited_for(experiment: Experiment, small_disk: Path, record_property: Note) -> None:
    experiment.set(model__name="mlp").run("prepare")
    filler = fill(small_disk)
    uri = {"MLFLOW_TRACKING_URI": f"sqlite:///{small_disk / 'mlflow.db'}"}
    said, late = late_seconds(experiment, experiment.start("train", **uri))
    warned_once(said)
    assert late < 10
    filler.unlink()
    assert "MLflow has all of it" in experiment.run("sync", **uri)
    assert in_mlflow(uri["MLFLOW_TRACKING_URI"], tag_of(experiment))["status"] == "FINISHED"
    record_property("happened", f"exit 0, {late:.1f} s late; with room and sync FINISHED")


@pytest.mark.fault(2, "SIGKILL of everything at once: launcher, torchrun, ranks, mirror")
@pytest.mark.fault(18, "SIGKILL of everything at once: MLflow says RUNNING; then sync, or the next start")
def test_after_a_power_cut_mlflow_is_told_the_truth_and_the_run_goes_on(
    baseline: Experiment, experiment: Experiment, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    for step in (40, 120):
        process = experiment.start("train")
        wait_for_step(experiment, step, process)
        # However busy the machine: they wait until MLflow has heard of it.
        for one in ranks_of(process):
            one.suspend()
        until = time.monotonic() + 60
        while [run.info.status for run in mlflow_runs(experiment)] != ["RUNNING"] and time.monotonic() < until:
            time.sleep(0.1)
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        assert json.loads((experiment.run_folder / "status.json").read_text())["outcome"] == "running"
        assert [run.info.status for run in mlflow_runs(experiment)] == ["RUNNING"]
        if step == 40:
            experiment.run("sync")
            assert [run.info.status for run in mlflow_runs(experiment)] == ["KILLED"]
    experiment.run("train")
    assert status(experiment)["outcome"] == "done"
    assert [run.info.status for run in mlflow_runs(experiment)] == ["FINISHED"]
    same_figures(experiment, baseline)
    record_property("happened", "sync says KILLED; the next start goes on in the same run, bit-equal, FINISHED")
