"""MLflow dead, deaf, slow, refusing, lying or full: training does not care, and after `sync` nothing is missing."""

import json
import math
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from pipeline.tracking.journal import last
from tests.faults.test_disk_faults import fill, small_disk
from tests.faults.test_rank_faults import status
from tests.kit.experiment import LONGER, Experiment
from tests.kit.mlflow_contents import in_mlflow
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


def tag_of(experiment: Experiment) -> str:
    return last(experiment.run_folder / "journal.jsonl", "run")["id"]


def late_seconds(experiment: Experiment, process: subprocess.Popen[str]) -> tuple[str, float]:
    """What it said, and how long after the last word of its journal it ended."""
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said, time.time() - last(experiment.run_folder / "journal.jsonl", "ended")["at"] / 1000


def warned_once(said: str) -> None:
    assert said.count("MLflow does not have all of it yet") == 1 and "To catch up: python -m pipeline sync" in said, said


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


def seconds_between_lines(experiment: Experiment, since: float, until: float) -> float:
    """The lower quartile of the times between two log lines in this while: other load makes some longer, a wait for a server all."""
    times = [line["at"] for line in experiment.journal("metrics") if "train/loss" in line["values"] and since < line["at"] / 1000 < until]
    return statistics.quantiles((later - before for before, later in pairwise(times)), n=4)[0] / 1000


@pytest.mark.parametrize("mode", ["hole", "500", "liar"])
@pytest.mark.fault(16, "the same speed: the steps of one run before and after its server is black-holed")
@pytest.mark.fault(17, "behind a proxy the server is black-holed, answers 500, or says yes and keeps nothing")
def test_a_bad_server_makes_the_exit_late_by_ten_seconds_at_most(
    baseline: Experiment, experiment: Experiment, server: Server, mode: str, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    proxy = Proxy(server.uri)
    process = experiment.start("train", MLFLOW_TRACKING_URI=proxy.uri)
    wait_for_step(experiment, 100, process)
    ranks = {one.pid for one in ranks_of(process)}
    proxy.mode, changed_at = mode, time.time()
    said, late = late_seconds(experiment, process)
    warned_once(said)
    assert late < 10
    # Other processes ask the server, and never a rank.
    assert ranks and proxy.clients and not proxy.clients & ranks
    before, after = (seconds_between_lines(experiment, *when) for when in ((0, changed_at), (changed_at, math.inf)))
    # Who waits for a server that never answers waits for seconds; other load makes steps twice as long.
    assert after < before + 0.1
    proxy.mode = "pass"
    assert "MLflow has all of it" in experiment.run("sync", MLFLOW_TRACKING_URI=proxy.uri)
    proxy.close()
    assert in_mlflow(server.uri, tag_of(experiment)) == in_mlflow(f"sqlite:///{baseline.folder / 'mlflow.db'}", tag_of(baseline))
    same_figures(experiment, baseline)
    speed = f"{1000 * before:.0f} ms between log lines before, {1000 * after:.0f} after"
    record_property("happened", f"{mode}: exit 0, {late:.1f} s late, one warning; {speed}; after sync the same as baseline")


@pytest.mark.fault(17, "behind a proxy every call takes 1.2 s, a minute in all")
def test_a_slow_server_is_waited_for_as_long_as_it_takes_what_it_is_sent(
    baseline: Experiment, experiment: Experiment, server: Server, record_property: Note
) -> None:
    experiment.set(**LONGER).run("prepare")
    proxy = Proxy(server.uri)
    proxy.mode, proxy.slow_seconds = "slow", 1.2
    said, late = late_seconds(experiment, experiment.start("train", MLFLOW_TRACKING_URI=proxy.uri))
    proxy.close()
    # As long as a server that answers nothing is waited for, several times over.
    assert late > 40
    assert said.count("MLflow is still receiving; waiting for it") == 1, said
    assert "MLflow does not have all of it yet" not in said
    assert in_mlflow(server.uri, tag_of(experiment)) == in_mlflow(f"sqlite:///{baseline.folder / 'mlflow.db'}", tag_of(baseline))
    record_property("happened", f"slow: exit 0, {late:.0f} s late, which it says; MLflow has the same as baseline")


@pytest.mark.fault(17, "behind a proxy every call takes 3 s, and Ctrl-C while it is waited for")
def test_ctrl_c_leaves_what_a_slow_server_does_not_have_to_sync(experiment: Experiment, server: Server, record_property: Note) -> None:
    experiment.set(model__name="mlp").run("prepare")
    proxy = Proxy(server.uri)
    proxy.mode = "slow"
    process = experiment.start("train", MLFLOW_TRACKING_URI=proxy.uri)
    assert process.stdout is not None
    said = ""
    while "still receiving" not in said:
        said += (line := process.stdout.readline())
        assert line, said
    process.send_signal(signal.SIGINT)
    interrupted_at = time.monotonic()
    said += process.communicate(timeout=30)[0]
    assert time.monotonic() - interrupted_at < 5
    assert process.returncode == 0, said
    assert status(experiment)["outcome"] == "done"
    warned_once(said)
    proxy.mode = "pass"
    assert "MLflow has all of it" in experiment.run("sync", MLFLOW_TRACKING_URI=proxy.uri)
    proxy.close()
    record_property("happened", "exit 0 at once, done; sync sends the rest")


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
